//! Offers the tools of a client under test, for `toolbus dev conformance`, with this crate.
//!
//! Exits with 0 after SIGTERM or a final drain of the bus, with 1 when the bus refused it.
use std::collections::HashMap;
use std::io::Write;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::sync::Barrier;
use toolbus::pb::content_block::Kind;
use toolbus::*;

static PLUGIN: LazyLock<Plugin> = LazyLock::new(|| Plugin::new("conformance"));
static HOSTS: LazyLock<Mutex<HashMap<String, Arc<Host>>>> = LazyLock::new(Mutex::default); // by the address of their bus
static WATCHES: Mutex<Vec<Watch<CatalogChange>>> = Mutex::new(Vec::new());
static MEETINGS: LazyLock<Mutex<HashMap<usize, Arc<Barrier>>>> = LazyLock::new(Mutex::default); // by how many people meet

/// A call that the tool `host` makes, or what else it does.
#[derive(Deserialize, schemars::JsonSchema)]
struct Drive {
    address: String,
    name: Option<String>,
    arguments: Option<Box<RawValue>>,
    timeout: Option<f64>,
    cancel_after: Option<f64>,
    form: Option<Value>,
    list: Option<bool>,
    watch: Option<usize>,
    close: Option<bool>,
}

/// What an application saw of a call.
#[derive(Default, Serialize)]
struct Seen {
    failed: bool,
    cancelled: bool,
    code: String,
    stage: String,
    retry_safe: bool,
    message: String,
    output: Option<Box<RawValue>>,
    progress: Vec<(f64, f64, String)>,
    chunks: Vec<String>,
    content: Vec<String>,
    seconds: f64,
}

struct Slow;

impl Drop for Slow {
    fn drop(&mut self) {
        eprintln!("slow stopped");
    }
}

fn tool(name: &str, description: &str) -> Tool {
    Tool {
        name: name.into(),
        description: description.into(),
        parameters_json: r#"{"type":"object"}"#.into(),
        ..Default::default()
    }
}

fn offer_echo(name: &str) -> Result<()> {
    PLUGIN.remove_tool(name);
    PLUGIN.add(tool(name, "Returns its arguments."), |arguments: Box<RawValue>, _| async move { Ok(arguments) })
}

fn mime_type(part: &ContentBlock) -> String {
    match &part.kind {
        Some(Kind::Image(image)) => image.mime_type.clone(),
        Some(Kind::Audio(audio)) => audio.mime_type.clone(),
        Some(Kind::Resource(resource)) => resource.mime_type.clone(),
        _ => "text/plain".into(),
    }
}

async fn drive(drive: Drive) -> Result<Value, BoxError> {
    let options = Options { address: drive.address.clone(), ..Default::default() };
    let host = match HOSTS.lock().unwrap().get(&drive.address).cloned() {
        Some(host) => host,
        None => Arc::new(Host::with("conformance-host", options)?),
    };
    HOSTS.lock().unwrap().insert(drive.address.clone(), host.clone());
    if drive.close == Some(true) {
        HOSTS.lock().unwrap().remove(&drive.address);
        host.close().await;
        return Ok(Value::Null);
    }
    if drive.list == Some(true) {
        let listing = host.list(ListRequest::default()).await?;
        let names: Vec<&str> = listing.tools.iter().map(ListedTool::name).collect();
        return Ok(json!({"tools": names, "revision": listing.revision}));
    }
    if let Some(count) = drive.watch {
        let (mut watch, mut changes) = (host.watch()?, Vec::new());
        let names = |tools: &[ListedTool]| tools.iter().map(|tool| tool.name().to_owned()).collect::<Vec<_>>();
        for _ in 0..count {
            let change = watch.next().await?;
            let removed: Vec<&str> = change.removed.iter().map(|tool| tool.name.as_str()).collect();
            changes.push(json!({"full": change.full, "added": names(&change.added), "changed": names(&change.changed), "removed": removed}));
        }
        WATCHES.lock().unwrap().push(watch); // goes on: its stream is looked at until its host is closed
        return Ok(json!({"changes": changes}));
    }
    Err("nothing to do: give name, list, watch or close".into())
}

/// Makes a call, and returns the application's view.
async fn called(host: Arc<Host>, drive: Drive) -> Result<Seen, BoxError> {
    let started = Instant::now();
    let items: Arc<Mutex<Vec<ToolProgress>>> = Arc::default();
    let heard = items.clone();
    let mut call = host
        .call(drive.name.unwrap_or_default(), drive.arguments)
        .on_progress(move |item| heard.lock().unwrap().push(item));
    if let Some(seconds) = drive.timeout {
        call = call.timeout(Duration::from_secs_f64(seconds));
    }
    if let Some(form) = drive.form {
        call = call.on_input(move |_| std::future::ready(Some(form.clone())));
    }
    let patience = drive.cancel_after.map_or(Duration::MAX, Duration::from_secs_f64);
    let result = tokio::time::timeout(patience, call.into_future()).await.ok();
    let items = std::mem::take(&mut *items.lock().unwrap());
    let mut seen = Seen { cancelled: result.is_none(), seconds: started.elapsed().as_secs_f64(), ..Default::default() };
    for item in items {
        seen.content.extend(item.content.iter().map(mime_type));
        if item.output_chunk.is_empty() {
            seen.progress.push((item.progress, item.total, item.message));
        } else {
            seen.chunks.push(item.output_chunk);
        }
    }
    if let Some(result) = result {
        seen.content.extend(result.content.iter().map(mime_type));
        seen.failed = result.is_error || result.error.is_some();
        seen.output = result.output().ok();
        if let Some(error) = result.error {
            (seen.code, seen.stage) = (error.code_name(), error.stage_name());
            (seen.retry_safe, seen.message) = (error.retry_safe, error.message);
        }
    }
    Ok(seen)
}

fn offer_all() -> Result<()> {
    offer_echo("echo")?;
    PLUGIN.add(tool("fail", "Fails with `message`."), |arguments: Value, _| async move {
        Err::<(), _>(arguments["message"].as_str().unwrap_or_default().into())
    })?;
    PLUGIN.add(
        tool("slow", "Reports progress once, then works until it is cancelled."),
        |_: Value, scope| async move {
            let _slow = Slow;
            scope.progress(0.0, 0.0, "");
            std::future::pending::<()>().await;
            Ok(())
        },
    )?;
    PLUGIN.add(
        tool("steps", "Reports `count` steps of progress, then returns the count."),
        |arguments: Value, scope| async move {
            let count = arguments["count"].as_u64().ok_or("count must be an integer")?;
            for step in 1..=count {
                scope.progress(step as f64, count as f64, format!("step {step}"));
            }
            Ok(json!({"count": count}))
        },
    )?;
    PLUGIN.add(
        tool("meet", "Returns once `people` calls of it run at the same time."),
        |arguments: Value, _| async move {
            let people = arguments["people"].as_u64().ok_or("people must be an integer")? as usize;
            let meeting =
                MEETINGS.lock().unwrap().entry(people).or_insert_with(|| Arc::new(Barrier::new(people))).clone();
            meeting.wait().await;
            Ok(json!({"met": people}))
        },
    )?;
    #[derive(Deserialize, schemars::JsonSchema)]
    struct Relay {
        name: String,
        arguments: Option<Box<RawValue>>,
    }
    PLUGIN.add(tool("relay", "Calls the tool `name` with `arguments` through the bus and returns its output."), |relay: Relay, scope| async move {
        Ok(scope.call(relay.name, relay.arguments).await.output::<Box<RawValue>>()?)
    })?;
    PLUGIN.add(tool("context", "Returns the context of its call."), |_: Value, scope| async move {
        let context = scope.context();
        Ok(json!({"user_id": context.user_id, "attributes": context.attributes}))
    })?;
    PLUGIN.add(
        tool("chunks", "Sends each of `texts` as a piece of the output, and returns them joined."),
        |arguments: HashMap<String, Vec<String>>, scope| async move {
            let texts = arguments.get("texts").ok_or("texts is missing")?;
            texts.iter().for_each(|text| scope.chunk(text));
            Ok(texts.concat())
        },
    )?;
    PLUGIN.add(tool("picture", "Returns a text and an image."), |_: Value, _| async move {
        Reply::new("a picture", [ContentBlock::image(*b"\x89PNG\r\n\x1a\n", "image/png")])
    })?;
    PLUGIN.add(
        tool("ask", "Asks two questions, one after the other, and returns both answers."),
        |_: Value, scope| async move {
            let ask = |key: &str| {
                let schema = json!({"type": "object", "properties": {"text": {"type": "string"}}});
                let params = json!({"mode": "form", "message": format!("{key}?"), "requestedSchema": schema});
                scope.ask(json!({key: {"method": "elicitation/create", "params": params}}))
            };
            let (first, second) = (ask("first")?, ask("second")?);
            Ok(json!({"first": first["first"], "second": second["second"], "accepts": scope.message().accepts}))
        },
    )?;
    PLUGIN.add(tool("big", "Returns a text of `bytes` letters."), |arguments: Value, _| async move {
        Ok("x".repeat(arguments["bytes"].as_u64().unwrap_or_default() as usize))
    })?;
    PLUGIN.add(tool("late_progress", "Reports progress after it has returned."), |_: Value, scope| async move {
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(50)).await;
            scope.progress(0.0, 0.0, "");
        });
        Ok(())
    })?;
    PLUGIN.add(
        tool("offer", "Offers another tool `name` that returns its arguments."),
        |arguments: Value, _| async move { Ok(offer_echo(arguments["name"].as_str().unwrap_or_default())?) },
    )?;
    PLUGIN.add(tool("withdraw", "Withdraws the tool `name`."), |arguments: Value, _| async move {
        PLUGIN.remove_tool(arguments["name"].as_str().unwrap_or_default());
        Ok(())
    })?;
    #[derive(Deserialize, schemars::JsonSchema)]
    struct Record {
        file: String,
        text: String,
        seconds: f64,
    }
    PLUGIN.add(
        tool("record", "Appends `text` as a line to `file`, works for `seconds`, and returns the text."),
        |Record { file, text, seconds }: Record, _| async move {
            let mut file = std::fs::OpenOptions::new().append(true).create(true).open(file)?;
            file.write_all(format!("{text}\n").as_bytes())?;
            tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
            Ok(text)
        },
    )?;
    PLUGIN.add(tool("about", "Returns name, version, language and roles of this client."), |_: Value, _| async move {
        let about = json!({"name": "clients/rust", "version": env!("CARGO_PKG_VERSION"), "language": "rust"});
        Ok(json!({"name": about["name"], "version": about["version"], "language": about["language"], "roles": ["plugin", "host", "remote"]}))
    })?;
    PLUGIN.add(
        tool("host", "Makes a call by a host of its own, lists, watches, or closes that host."),
        |args: Drive, _| async move {
            if args.name.is_none() {
                return Ok(serde_json::value::to_raw_value(&drive(args).await?)?);
            }
            let options = Options { address: args.address.clone(), ..Default::default() };
            let made = Arc::new(Host::with("conformance-host", options)?);
            let host = HOSTS.lock().unwrap().entry(args.address.clone()).or_insert(made).clone();
            Ok(serde_json::value::to_raw_value(&called(host, args).await?)?)
        },
    )
}

#[tokio::main]
async fn main() -> Result<()> {
    offer_all()?;
    let ended = PLUGIN.run().await;
    let hosts: Vec<Arc<Host>> = HOSTS.lock().unwrap().drain().map(|(_, host)| host).collect();
    for host in hosts {
        host.close().await;
    }
    ended
}
