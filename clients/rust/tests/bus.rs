//! Plays plugins and hosts of this crate on a bus: the program TOOLBUS, or `toolbus`.
use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::value::RawValue;
use serde_json::{Value, json};
use toolbus::*;

struct Bus {
    process: Child,
    address: String,
}

impl Bus {
    fn start(address: &str) -> Bus {
        let program = std::env::var("TOOLBUS").unwrap_or_else(|_| "toolbus".into());
        let arguments = ["serve", "--grpc", address, "--http", "off", "--ephemeral"];
        let mut process =
            Command::new(program).args(arguments).stdout(Stdio::piped()).spawn().expect("no program toolbus");
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let ready =
            lines.find_map(|line| line.unwrap().strip_prefix("toolbus ready grpc=").map(str::to_owned)).unwrap();
        std::thread::spawn(move || lines.for_each(drop));
        Bus { process, address: ready.split(' ').next().unwrap().into() }
    }

    fn signal(&self, name: &str) {
        assert!(Command::new("kill").args(["-s", name, &self.process.id().to_string()]).status().unwrap().success());
    }

    fn options(&self) -> Options {
        Options { address: self.address.clone(), ..Default::default() }
    }

    fn host(&self) -> Host {
        Host::with("test", self.options()).unwrap()
    }
}

impl Drop for Bus {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

async fn until<F: Future<Output = bool>>(condition: impl Fn() -> F) {
    while !condition().await {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn failures_panics_and_wrong_arguments_end_their_call_and_say_why() {
    #[derive(serde::Deserialize, schemars::JsonSchema)]
    struct Ask {
        city: String,
        #[serde(default)]
        days: Option<u8>,
    }
    let bus = Bus::start("127.0.0.1:0");
    let plugin = Plugin::with("test", bus.options());
    plugin
        .tool("panic", "", |_: Value, _| async move { if true { panic!("no {}", "luck") } else { Ok(()) } })
        .tool(
            "named",
            "",
            |_: Value, _| async move { Err::<(), _>(CallError::tool("no_city", "there is none").into()) },
        )
        .tool("typed", "", |ask: Ask, _| async move { Ok((ask.city, ask.days)) })
        .tool("echo", "", |given: Box<RawValue>, _| async move { Ok(given) });
    plugin.ready().await.unwrap();
    let host = bus.host();
    let error = host.call("panic", ()).await.error.unwrap();
    assert_eq!((error.code(), &*error.message), (ErrorCode::Tool, "no luck"));
    let error = host.call("named", ()).await.output::<Value>().unwrap_err();
    assert_eq!((&*error.reason, &*error.to_string(), &*error.stage_name()), ("no_city", "there is none", "ACCEPTED"));
    let error = host.call("typed", json!({"city": 1})).await.error.unwrap();
    assert_eq!((error.code(), error.stage()), (ErrorCode::InvalidArguments, CallStage::NotDispatched));
    assert_eq!(host.call("typed", r#"{"city": "Oslo", "days": 3}"#).await.output(), Ok(("Oslo".to_owned(), Some(3))));
    assert_eq!(host.call("typed", json!({"city": "Oslo"})).await.text(), r#"["Oslo",null]"#);
    let large = r#"{"n":123456789012345678901234567890,"f":1.10}"#;
    assert_eq!(host.call("echo", large).await.output::<Box<RawValue>>().unwrap().get(), large);
    let error = host.call("echo", vec![1]).await.error.unwrap();
    assert_eq!(error.code(), ErrorCode::InvalidArguments, "{error}");
    let listing = host.list(ListRequest { names: vec!["typed".into()], ..Default::default() }).await.unwrap();
    let schema: Value = serde_json::from_str(listing.tools[0].parameters_json()).unwrap();
    assert_eq!((&schema["required"], &listing.tools[0].warnings), (&json!(["city"]), &vec![]));
    assert!(plugin.add(Tool { name: "a b".into(), ..Default::default() }, |_: Value, _| async { Ok(()) }).is_err());
    host.close().await;
    assert_eq!(host.call("echo", ()).await.error.unwrap().code(), ErrorCode::Cancelled);
}

#[tokio::test]
async fn a_dropped_call_stops_its_handler_and_what_that_calls() {
    struct Noted(Arc<Mutex<Vec<&'static str>>>, &'static str);
    impl Drop for Noted {
        fn drop(&mut self) {
            self.0.lock().unwrap().push(self.1);
        }
    }
    let bus = Bus::start("127.0.0.1:0");
    let plugin = Plugin::with("test", bus.options());
    let stopped: Arc<Mutex<Vec<&'static str>>> = Arc::default();
    let (outer, inner) = (stopped.clone(), stopped.clone());
    plugin
        .tool("outer", "", move |_: Value, scope| {
            let noted = Noted(outer.clone(), "outer");
            async move {
                let _noted = noted;
                scope.call("inner", ()).await;
                Ok(())
            }
        })
        .tool("inner", "", move |_: Value, _| {
            let noted = Noted(inner.clone(), "inner");
            async move {
                let _noted = noted;
                std::future::pending::<()>().await;
                Ok(())
            }
        });
    plugin.ready().await.unwrap();
    let given_up = tokio::time::timeout(Duration::from_millis(300), bus.host().call("outer", ()).into_future()).await;
    assert!(given_up.is_err());
    until(|| async { stopped.lock().unwrap().len() == 2 }).await;
    plugin.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn handlers_that_block_their_threads_do_not_keep_others_of_the_same_message_waiting() {
    let bus = Bus::start("127.0.0.1:0");
    let plugin = Plugin::with("blocks", bus.options());
    let meeting = Arc::new(std::sync::Barrier::new(2));
    plugin.tool("meet", "Returns once two calls have come.", move |_: Value, _| {
        let meeting = meeting.clone();
        async move {
            meeting.wait();
            Ok(())
        }
    });
    plugin.ready().await.unwrap();
    let host = bus.host();
    let (one, other) = tokio::join!(host.call("meet", ()).into_future(), host.call("meet", ()).into_future());
    assert!(!one.is_error && !other.is_error, "{one:?} {other:?}");
    host.close().await;
    plugin.close().await;
}

#[tokio::test]
async fn with_several_addresses_a_plugin_is_at_each_bus_and_a_host_goes_on_at_the_next() {
    let folder = std::env::temp_dir().join(format!("toolbus-rust-{}", std::process::id()));
    std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(&folder).unwrap();
    let (first, second) = (Bus::start("127.0.0.1:0"), Bus::start(&format!("unix:{}", folder.join("bus").display())));
    let options = Options { address: format!("{},{}", first.address, second.address), ..Default::default() };
    let plugin = Plugin::with("test", options.clone());
    plugin.tool("hello", "", |_: HashMap<String, Value>, _| async { Ok("hello") }).ready().await.unwrap();
    for bus in [&first, &second] {
        let host = bus.host();
        until(|| async { !host.list(ListRequest::default()).await.unwrap().tools.is_empty() }).await;
    }
    let host = Host::with("test", options).unwrap();
    let mut watch = second.host().watch().unwrap();
    assert!(watch.next().await.unwrap().full);
    assert_eq!(host.call("hello", ()).await.text(), "hello");
    drop(first);
    // A call that is sent before the host notices may have run, so it is not made again at the second bus.
    until(|| async { host.call("hello", ()).await.text() == "hello" }).await;
    plugin.add(Tool { name: "later".into(), ..Default::default() }, |_: Value, _| async { Ok(1) }).unwrap();
    assert_eq!(watch.next().await.unwrap().added[0].name(), "later");
    std::fs::remove_dir_all(folder).unwrap();
}

#[tokio::test]
async fn a_credential_that_is_about_to_be_copied_is_used_as_it_was_before() {
    let file = std::env::temp_dir().join(format!("toolbus-rust-{}.toolbus", std::process::id()));
    std::fs::write(&file, "name = \"chat\"").unwrap();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let lines = Arc::new(Mutex::new(Vec::new()));
    let log: Arc<dyn Fn(&str) + Send + Sync> = {
        let lines = lines.clone();
        Arc::new(move |line: &str| lines.lock().unwrap().push(line.to_owned()))
    };
    let (first, second) = (Bus::start("127.0.0.1:0"), Bus::start("127.0.0.1:0"));
    let address = format!("{},{}", first.address, second.address);
    let credential = file.display().to_string();
    let host = Host::with("test", Options { address, credential, log: Some(log), ..Default::default() }).unwrap();
    host.list(ListRequest::default()).await.unwrap();
    std::fs::remove_file(file).unwrap();
    drop(first);
    until(|| async { host.list(ListRequest::default()).await.is_ok() }).await;
    let lines = lines.lock().unwrap();
    assert!(lines.iter().any(|line| line.ends_with("using the credential that was read before")), "{lines:?}");
}

#[tokio::test]
async fn each_bus_that_does_not_answer_is_logged_once_and_not_at_each_attempt() {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let log: Arc<dyn Fn(&str) + Send + Sync> = {
        let lines = lines.clone();
        Arc::new(move |line: &str| lines.lock().unwrap().push(line.to_owned()))
    };
    let options = Options { address: "127.0.0.1:1,127.0.0.1:2".into(), log: Some(log), ..Default::default() };
    let host = Host::with("test", options).unwrap();
    let result = host.call("any", ()).timeout(Duration::from_secs(3)).await;
    assert_eq!(result.error.unwrap().stage(), CallStage::NotDispatched);
    assert_eq!(lines.lock().unwrap().len(), 2, "{lines:?}");
}

#[tokio::test]
async fn at_a_bus_that_hangs_every_wait_ends_in_time_and_a_call_says_whether_it_may_have_run() {
    let bus = Bus::start("127.0.0.1:0");
    let plugin = Plugin::with("test", bus.options());
    plugin.tool("hello", "", |_: Value, _| async { Ok("hello") }).ready().await.unwrap();
    let (host, late) = (bus.host(), bus.host());
    host.ready().await.unwrap();
    let mut watch = host.watch().unwrap();
    assert!(watch.next().await.unwrap().full);
    bus.signal("STOP");
    let call = |host: &Host| {
        let call = host.call("hello", ()).timeout(Duration::from_secs(1));
        tokio::time::timeout(Duration::from_secs(7), call.into_future())
    };
    let listing = tokio::time::timeout(Duration::from_secs(15), host.list(ListRequest::default()));
    let (sent, unsent, listed) = tokio::join!(call(&host), call(&late), listing);
    let outcome = |result: ToolResult| result.error.map(|error| (error.code(), error.stage(), error.retry_safe));
    assert_eq!(outcome(sent.unwrap()), Some((ErrorCode::DeadlineExceeded, CallStage::Unknown, false)));
    assert_eq!(outcome(unsent.unwrap()), Some((ErrorCode::Unavailable, CallStage::NotDispatched, true)));
    assert!(matches!(listed.unwrap(), Err(Error::Lost(..))));
    let closing = async { tokio::join!(host.close(), late.close(), plugin.close()) };
    tokio::time::timeout(Duration::from_secs(15), closing).await.unwrap();
}

#[tokio::test]
async fn by_a_name_of_dns_a_plugin_and_a_host_find_each_bus_that_has_it_and_come_back_to_it() {
    let bus = Bus::start("127.0.0.1:0");
    let port = bus.address.rsplit(':').next().unwrap().to_owned();
    let logged: Arc<Mutex<String>> = Arc::default();
    let log: Log = {
        let logged = logged.clone();
        Arc::new(move |text| logged.lock().unwrap().push_str(text))
    };
    let address = format!("dns:no-bus.invalid:1, dns:localhost:{port}");
    let options = Options { address, log: Some(log.clone()), ..Default::default() };
    let plugin = Plugin::with("test", options.clone());
    plugin.tool("hello", "", |_: Value, _| async { Ok("hello") }).ready().await.unwrap();
    let host = Host::with("test", options).unwrap();
    assert_eq!(host.call("hello", ()).await.text(), "hello");
    assert!(plugin.call("hello", ()).unwrap().await.error.is_none());
    drop(bus);
    let again = Bus::start(&format!("127.0.0.1:{port}"));
    until(|| async { host.call("hello", ()).await.text() == "hello" }).await;
    plugin.close().await;
    assert!(again.host().list(ListRequest::default()).await.unwrap().tools.is_empty());

    let nowhere = Options { address: "dns:no-bus.invalid:1".into(), log: Some(log), ..Default::default() };
    let lost = Host::with("test", nowhere).unwrap().call("hello", ()).timeout(Duration::from_millis(300)).await;
    assert_eq!(lost.error.unwrap().code(), ErrorCode::Unavailable);
    assert!(logged.lock().unwrap().contains("DNS has no address for no-bus.invalid"), "{logged:?}");
}

#[tokio::test]
async fn a_plugin_that_one_of_its_buses_refuses_goes_on_at_the_others_and_one_without_buses_ends_when_it_is_closed() {
    let (first, second) = (Bus::start("127.0.0.1:0"), Bus::start("127.0.0.1:0"));
    let own = Plugin::with("test", Options { token: "own".into(), ..first.options() });
    own.ready().await.unwrap();
    let address = format!("{},{},{}", first.address, second.address, second.address);
    let plugin = Arc::new(Plugin::with("test", Options { address, ..Default::default() }));
    plugin.tool("hello", "", |_: Value, _| async { Ok("hello") }).ready().await.unwrap();
    let running = tokio::spawn({
        let plugin = plugin.clone();
        async move { plugin.run().await }
    });
    let host = second.host();
    until(|| async { host.call("hello", ()).await.text() == "hello" }).await;
    assert!(!running.is_finished());
    plugin.close().await;
    assert!(matches!(running.await.unwrap(), Err(Error::Refused(..))));

    let nowhere =
        Arc::new(Plugin::with("test", Options { address: "dns:no-bus.invalid:1".into(), ..Default::default() }));
    let running = tokio::spawn({
        let plugin = nowhere.clone();
        async move { (plugin.run().await, plugin.ready().await) }
    });
    nowhere.close().await;
    let (ended, ready) = running.await.unwrap();
    assert!(ended.is_ok() && ready.is_err(), "{ended:?} {ready:?}");
}

#[tokio::test]
async fn a_panic_of_an_on_progress_harms_no_call_and_a_bus_that_answers_no_attach_ends_a_listing_in_time() {
    let bus = Bus::start("127.0.0.1:0");
    let plugin = Plugin::with("test", bus.options());
    plugin.tool("steps", "", |_: Value, scope| async move {
        scope.progress(1.0, 1.0, "");
        Ok("done")
    });
    plugin.ready().await.unwrap();
    let host = bus.host();
    for _ in 0..2 {
        assert_eq!(host.call("steps", ()).on_progress(|_| panic!("of a test")).await.text(), "done");
    }
    let address = bus.address.clone();
    drop((plugin, bus));
    let silent = tokio::net::TcpListener::bind(address).await.unwrap();
    let connected = silent.accept().await.unwrap();
    assert!(matches!(host.list(ListRequest::default()).await, Err(Error::Lost(..))));
    drop(connected);
}

#[tokio::test]
async fn a_host_lends_its_model_to_a_plugin_with_the_permission_within_its_limits() {
    let bus = Bus::start("127.0.0.1:0");
    let host = bus.host();
    let lent = async |asked: GenerationRequest, _| {
        let text = format!("{} {} {:?}", asked.mode, asked.messages[0].content, asked.max_tokens);
        Ok(Generation { text, model: "m".into(), ..Default::default() })
    };
    let limits = LendOptions { max_tokens: Some(7), ..Default::default() };
    host.lend(limits, lent).unwrap();
    assert!(host.lend(limits, lent).unwrap_err().to_string().contains("lends its model already"));
    let none = LendOptions { max_tokens: Some(0), ..Default::default() };
    assert!(bus.host().lend(none, lent).unwrap_err().to_string().contains("max_tokens is 0"));
    let plugin = Plugin::with("test", bus.options());
    plugin.tool("ask", "", |_: Value, scope| async move { Ok(scope.generate("hello").await?.text) });
    plugin.ready().await.unwrap();
    let refused = plugin.generate("hello").await.unwrap_err();
    assert!(refused.message.contains("generation"), "{refused}");
    host.call("toolbus:grant", json!({"source": "test", "permission": "generation"})).await.output::<Value>().unwrap();
    until(|| async { plugin.generate("hello").await.is_ok() }).await;
    assert_eq!(host.call("ask", ()).await.text(), "quiet hello Some(7)");
    let more = GenerationRequest { max_tokens: Some(8), ..GenerationRequest::from("hello") };
    assert_eq!(plugin.generate(more).await.unwrap_err().code(), ErrorCode::InvalidArguments);
    host.close().await;
    assert!(plugin.generate("hello").await.is_err());
}

#[tokio::test]
async fn tools_that_do_not_fit_into_one_message_are_offered_too_and_a_refusal_ends_a_plugin_that_offers_all_or_none() {
    let bus = Bus::start("127.0.0.1:0");
    let plugin = Plugin::with("many", bus.options());
    let schema = format!(r#"{{"type":"object","description":"{}"}}"#, "x".repeat(200_000));
    let add = |plugin: &Plugin, name: String, schema: &str| {
        let tool = Tool { name, parameters_json: schema.into(), ..Default::default() };
        plugin.add(tool, |_: Value, _| async { Ok(()) })
    };
    (0..70).for_each(|number| add(&plugin, format!("tool_{number}"), &schema).unwrap());
    plugin.ready().await.unwrap();
    assert_eq!(bus.host().list(ListRequest::default()).await.unwrap().tools.len(), 70);
    let logged: Arc<Mutex<String>> = Arc::default();
    let log: Log = {
        let logged = logged.clone();
        Arc::new(move |text| logged.lock().unwrap().push_str(text))
    };
    let picky = Plugin::with("picky", Options { all_or_none: true, log: Some(log), ..bus.options() });
    add(&picky, "good".into(), "").unwrap();
    add(&picky, "bad".into(), r#"{"type":"nothing"}"#).unwrap();
    let problem = picky.run().await.unwrap_err();
    assert!(matches!(problem, Error::Refused(..)) && problem.to_string().contains("bad"), "{problem}");
    assert!(logged.lock().unwrap().contains("bad"));
    let unknown = Plugin::with("a source", bus.options()).ready().await.unwrap_err();
    assert!(unknown.to_string().contains("'a source', it must be"), "{unknown}");
}

/// Returns the snippets of a page in a language: the file name in the first line, the code, and what stands below.
fn snippets(page: &str, language: &str) -> Vec<(String, String, Option<String>)> {
    let text = std::fs::read_to_string(page).unwrap();
    let fence = format!("```{language}\n");
    let parts: Vec<&str> = text.split(&fence).skip(1).collect();
    let snippet = |part: &&str| {
        let (code, rest) = part.split_once("```").unwrap();
        let (first, _) = code.split_once('\n').unwrap();
        let output =
            rest.strip_prefix("\n\n```text\n").and_then(|text| text.split_once("```")).map(|(text, _)| text.to_owned());
        (first.trim_start_matches(['/', '#', ' ']).to_owned(), code.to_owned(), output)
    };
    parts.iter().map(snippet).collect()
}

fn cargo(folder: &Path, arguments: &[&str]) {
    let mut command = Command::new(env!("CARGO"));
    // What cargo tells this test would have it build ring again.
    for name in ["CARGO_MANIFEST_DIR", "CARGO_MANIFEST_PATH"] {
        command.env_remove(name);
    }
    let output = command.args(arguments).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "cargo {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test]
async fn the_snippets_of_the_pages_run_with_the_packed_crate_and_print_what_stands_below_them() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let target = own.join("build");
    cargo(own, &["package", "--no-verify", "--allow-dirty", "--locked", "--quiet"]);
    let folder = target.join("pages");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(folder.join("src/bin")).unwrap();
    let packed = target.join(format!("package/toolbus-{}.crate", env!("CARGO_PKG_VERSION")));
    assert!(
        Command::new("tar")
            .args(["--exclude=README.md", "-xzf"])
            .arg(packed)
            .current_dir(&folder)
            .status()
            .unwrap()
            .success()
    );
    let crate_folder = format!("toolbus-{}", env!("CARGO_PKG_VERSION"));
    let profile = std::fs::read_to_string(own.join("Cargo.toml")).unwrap();
    let (_, profile) = profile.split_once("[profile").unwrap(); // so that what is built here already need not be built again
    let manifest = snippets("README.md", "toml").remove(0).1.replace("PATH/clients/rust", &crate_folder);
    std::fs::write(folder.join("Cargo.toml"), format!("{manifest}\n[workspace]\n\n[profile{profile}")).unwrap();
    std::fs::copy(own.join("Cargo.lock"), folder.join("Cargo.lock")).unwrap();
    let mut programs = snippets("README.md", "rust");
    programs.extend(snippets("../../docs/start/rust.md", "rust"));
    for (name, code, _) in &programs {
        std::fs::write(folder.join("src/bin").join(name), code).unwrap();
        let (_, body) = code.split_once("fn main()").unwrap();
        let limit = [("weather.rs", 15), ("shouter.rs", 15), ("host.rs", 10), ("listener.rs", 10)]
            .into_iter()
            .find(|(each, _)| each == name)
            .map(|(_, limit)| limit);
        assert!(body.lines().count() < limit.unwrap_or(usize::MAX), "{name} has too many lines");
    }
    cargo(&folder, &["build", "--quiet", "--target-dir", target.to_str().unwrap()]);
    let bus = Bus::start("127.0.0.1:0");
    let program = |name: &str| {
        let mut command = Command::new(target.join("debug").join(name.trim_end_matches(".rs")));
        command.env("TOOLBUS_ADDRESS", &bus.address);
        command
    };
    let (plugins, hosts): (Vec<_>, Vec<_>) = programs.iter().partition(|(_, _, output)| output.is_none());
    assert_eq!((plugins.len(), hosts.len()), (3, 3));
    let mut running: Vec<Child> = plugins.iter().map(|(name, ..)| program(name).spawn().unwrap()).collect();
    let host = bus.host();
    until(|| async { host.list(ListRequest::default()).await.unwrap().tools.len() == 5 }).await;
    for (name, _, output) in hosts {
        let printed = program(name).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&printed.stdout), *output.as_ref().unwrap(), "{name}: {printed:?}");
    }
    for plugin in &mut running {
        Command::new("kill").arg(plugin.id().to_string()).status().unwrap();
        assert!(plugin.wait().unwrap().success());
    }
}
