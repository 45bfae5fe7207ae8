//! Writes the Rust of a descriptor set into a folder, for `../generate.sh`.
use prost::Message;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let [set, folder] = [1, 2].map(|n| std::env::args().nth(n).expect("generate SET FOLDER"));
    let files = prost_types::FileDescriptorSet::decode(&*std::fs::read(set)?)?;
    tonic_prost_build::configure().build_server(false).build_transport(false).out_dir(folder).compile_fds(files)?;
    Ok(())
}
