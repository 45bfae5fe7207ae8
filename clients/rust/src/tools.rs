//! Holds the tools of a plugin and answers their calls: each by its handler, and with exactly one result.
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt;
use prost::Message;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::calls::{BoxFuture, Call};
use crate::link::Link;
use crate::pb::*;
use crate::peer::Peer;
use crate::values::{BoxError, Error, Result, arguments_json};

const QUICK: Duration = Duration::from_millis(1); // for the handlers of one message; those behind then begin by themselves
const ERROR_CHARACTERS: usize = 16_384; // of the text of a failure

type Handler = Arc<dyn Fn(String, ToolScope) -> BoxFuture<Result<Reply, BoxError>> + Send + Sync>;

/// An output of a handler with parts beside it. Any type that serde can write is an output by itself.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// The output, as JSON text.
    pub output_json: String,
    /// Pictures, files and the like.
    pub content: Vec<ContentBlock>,
}

impl Reply {
    /// Returns a reply of an output and parts of content.
    pub fn new(output: impl Serialize, content: impl Into<Vec<ContentBlock>>) -> Result<Self, BoxError> {
        Ok(Reply { output_json: serde_json::to_string(&output)?, content: content.into() })
    }
}

/// What a handler can return: a [`Reply`], or anything that serde can write.
pub trait IntoReply {
    /// Returns it as a reply.
    fn into_reply(self) -> Result<Reply, BoxError>;
}

impl<T: Serialize> IntoReply for T {
    fn into_reply(self) -> Result<Reply, BoxError> {
        Reply::new(self, [])
    }
}

impl IntoReply for Reply {
    fn into_reply(self) -> Result<Reply, BoxError> {
        Ok(self)
    }
}

/// The answer of a person to [`ToolScope::elicit`].
#[derive(Clone, Debug, Deserialize)]
pub struct Answer {
    /// `accept`, `decline` or `cancel`.
    pub action: String,
    /// The fields of the form that was filled in.
    #[serde(default)]
    pub content: Value,
}

impl Answer {
    /// Whether the person filled in the form.
    pub fn accepted(&self) -> bool {
        self.action == "accept"
    }
}

/// Ends a handler with a result that is not of its own: its questions, after whose answers it runs again, or why it did not run.
#[derive(Debug)]
struct Stop(ToolResult);

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("the handler asks its caller, and runs again with the answers: return this error")
    }
}

impl std::error::Error for Stop {}

fn not_run<T>(code: ErrorCode, text: String) -> Result<T, BoxError> {
    Err(Stop(CallError::new(code, CallStage::NotDispatched, text).into()).into())
}

/// A call, as its handler sees it. The handler is dropped where it waits when the call is cancelled.
#[derive(Clone)]
pub struct ToolScope {
    message: Arc<ToolCall>,
    link: Arc<Link>,
    peer: Arc<Peer>,
    over: CancellationToken,
    began: Instant,
    asked: Arc<AtomicUsize>, // how many questions without a key this run has asked
}

impl ToolScope {
    /// Returns the call as it came: its name, arguments, role, context, trace and what its caller accepts.
    pub fn message(&self) -> &ToolCall {
        &self.message
    }

    /// Returns the user and the conversation, as the host states them.
    pub fn context(&self) -> CallContext {
        self.message.context.clone().unwrap_or_default()
    }

    /// Whether the call is over: a handler that blocks its thread, or has tasks of its own, stops then.
    pub fn is_cancelled(&self) -> bool {
        self.over.is_cancelled()
    }

    /// Waits until the call is over, for tasks of the handler's own.
    pub async fn cancelled(&self) {
        self.over.cancelled().await
    }

    /// Returns the time until the deadline; None without one.
    pub fn time_left(&self) -> Option<Duration> {
        let time = Duration::try_from_secs_f64(self.message.timeout_seconds).ok().filter(|time| !time.is_zero())?;
        Some(time.saturating_sub(self.began.elapsed()))
    }

    /// Reports how much is done, of a total (0: unknown), and resets the idle timeout.
    pub fn progress(&self, progress: f64, total: f64, message: impl Into<String>) {
        self.report(ToolProgress { progress, total, message: message.into(), ..Default::default() });
    }

    /// Sends the next piece of the output. The result must still have the whole output.
    pub fn chunk(&self, text: impl Into<String>) {
        self.report(ToolProgress { output_chunk: text.into(), ..Default::default() });
    }

    /// Reports progress with any of its fields. What the bus cannot carry is left out.
    pub fn report(&self, progress: ToolProgress) {
        let call_id = self.message.call_id.clone();
        if let Err(text) = self.link.report(ToolProgress { call_id, ..progress }) {
            self.peer.log(&format!("tool {}: {text}", self.message.name));
        }
    }

    /// Calls another tool as part of this call: with its context, no longer than it, and cancelled with it.
    pub fn call(&self, name: impl Into<String>, arguments: impl Serialize) -> Call {
        let mut call = Call::new(self.peer.clone(), name.into(), arguments_json(&arguments));
        call.parent = Some((self.link.clone(), self.over.clone()));
        call.with(|call| {
            call.parent_call_id.clone_from(&self.message.call_id);
            call.traceparent.clone_from(&self.message.traceparent);
            call.tracestate.clone_from(&self.message.tracestate);
        })
    }

    /// Asks the person behind the caller by a form, whose schema is JSON Schema or its properties alone.
    ///
    /// The error ends this run: return it by `?`, and the handler runs again from its beginning with the answer. So ask
    /// before you change anything, and check the action of the answer: a person may decline.
    pub fn elicit(&self, message: &str, schema: Value) -> Result<Answer, BoxError> {
        let whole = schema.get("properties").is_some_and(Value::is_object);
        let schema = if whole { schema } else { json!({"type": "object", "properties": schema}) };
        let params = json!({"mode": "form", "message": message, "requestedSchema": schema});
        // FNV-1a: two runs of a handler that ask the same have the same key
        let digest = params
            .to_string()
            .bytes()
            .fold(0xcbf29ce484222325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100000001b3));
        let key = format!("{}-{digest:016x}", self.asked.fetch_add(1, Ordering::Relaxed) + 1);
        let mut answers = self.ask(json!({&key: {"method": "elicitation/create", "params": params}}))?;
        Ok(serde_json::from_value(answers.remove(&key).unwrap_or_default())?)
    }

    /// Asks several questions of any kind at once, an object by key, and returns the answers by key; else as `elicit`.
    pub fn ask(&self, questions: Value) -> Result<Map<String, Value>, BoxError> {
        let object = |json: &str| serde_json::from_str::<Map<String, Value>>(json).unwrap_or_default();
        let mut known = object(&self.message.request_state)
            .remove("answers")
            .and_then(|answers| answers.as_object().cloned())
            .unwrap_or_default();
        known.extend(object(&self.message.input_responses_json));
        let Value::Object(mut questions) = questions else {
            return Err("the questions must be an object by key".into());
        };
        questions.retain(|key, question| {
            let answered = known.get(key).is_some_and(|answer| answers(question, answer));
            if !answered {
                known.remove(key);
            }
            !answered
        });
        if questions.is_empty() {
            return Ok(known);
        }
        let request_state = if known.is_empty() { String::new() } else { json!({"answers": known}).to_string() };
        let input_requests_json = json!(questions).to_string();
        Err(Stop(ToolResult { input_requests_json, request_state, ..Default::default() }).into())
    }
}

/// Tells whether an answer fits its question: callers can send anything.
fn answers(question: &Value, answer: &Value) -> bool {
    if question["method"] != "elicitation/create" {
        return answer.is_object();
    }
    match answer["action"].as_str() {
        Some("accept") => {
            let required = question["params"]["requestedSchema"]["required"].as_array();
            required
                .into_iter()
                .flatten()
                .all(|name| answer["content"].get(name.as_str().unwrap_or_default()).is_some())
        }
        action => matches!(action, Some("decline" | "cancel")),
    }
}

/// Returns the JSON Schema of a type, as text, for `Tool::output_schema_json`.
pub fn schema_of<T: JsonSchema>() -> String {
    let schema = schemars::schema_for!(T).to_value();
    if schema.is_object() { schema.to_string() } else { "{}".into() }
}

struct Offered {
    place: usize, // among the tools, by when they were added
    tool: Tool,
    handler: Handler,
}

/// The tools that a plugin offers, at each of its buses.
pub(crate) struct Tools {
    offered: Mutex<HashMap<String, Offered>>,
    pub version: watch::Sender<u64>, // rises with every change
}

impl Tools {
    pub fn new() -> Arc<Tools> {
        Arc::new(Tools { offered: Mutex::default(), version: watch::Sender::new(0) })
    }

    fn offered(&self) -> MutexGuard<'_, HashMap<String, Offered>> {
        self.offered.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn add<A, F, Fut, R>(&self, mut tool: Tool, handler: F) -> Result<()>
    where
        A: DeserializeOwned + JsonSchema,
        F: Fn(A, ToolScope) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<R, BoxError>> + Send + 'static,
        R: IntoReply,
    {
        let name = tool.name.clone();
        let named = |text| Err(Error::Setup(format!("tool '{name}': {text}")));
        if name.is_empty()
            || name.len() > 64
            || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte))
        {
            return named("its name breaks the rule [A-Za-z0-9_.-]{1,64}: rename it".into());
        }
        for (field, seconds) in
            [("timeout_seconds", tool.timeout_seconds), ("idle_timeout_seconds", tool.idle_timeout_seconds)]
        {
            if !(0.0..=300.0).contains(&seconds) {
                return named(format!("{field} is {seconds}, it must be at most 300, or 0 for none of its own"));
            }
        }
        if tool.parameters_json.is_empty() {
            tool.parameters_json = match schema_of::<A>() {
                any if any == "{}" || any.contains("\"$schema\"") && !any.contains("\"type\"") => {
                    r#"{"type":"object"}"#.into()
                }
                schema => schema,
            };
        }
        let mut offered = self.offered();
        if offered.contains_key(&name) {
            return named("there is one already: rename one, or remove_tool the other first".into());
        }
        let run = move |json: String, scope: ToolScope| -> BoxFuture<Result<Reply, BoxError>> {
            match serde_json::from_str::<A>(&json) {
                Ok(arguments) => {
                    let output = handler(arguments, scope);
                    Box::pin(async move { output.await?.into_reply() })
                }
                Err(problem) => {
                    let text = format!("the arguments {json:.80} are not what the tool takes: {problem}");
                    Box::pin(async { not_run(ErrorCode::InvalidArguments, text) })
                }
            }
        };
        let place = offered.values().map(|each| each.place + 1).max().unwrap_or(0);
        offered.insert(name, Offered { place, tool, handler: Arc::new(run) });
        drop(offered);
        self.version.send_modify(|version| *version += 1);
        Ok(())
    }

    pub fn remove(&self, name: &str) -> bool {
        let existed = self.offered().remove(name).is_some();
        self.version.send_modify(|version| *version += u64::from(existed));
        existed
    }

    /// Returns what requests declare, each at most so many bytes.
    pub fn pages(&self, bytes: usize) -> Vec<Vec<Tool>> {
        let offered = self.offered();
        let mut sorted: Vec<&Offered> = offered.values().collect();
        sorted.sort_by_key(|each| each.place);
        let (mut pages, mut used) = (vec![Vec::new()], 0);
        for Offered { tool, .. } in sorted {
            used += tool.encoded_len() + 8;
            if used > bytes && pages.last().is_some_and(|page: &Vec<Tool>| !page.is_empty()) {
                pages.push(Vec::new());
                used = tool.encoded_len() + 8;
            }
            pages.last_mut().into_iter().for_each(|page| page.push(tool.clone()));
        }
        pages
    }

    /// Starts the handlers of calls that came in one message, and does not wait for them.
    ///
    /// One task runs them, one after the other, as far as they go at once: a task for each would cost more than most handlers.
    /// What waits becomes a task of its own, and so do those behind one that blocks its thread.
    pub fn begin(self: &Arc<Self>, calls: Vec<ToolCall>, link: &Arc<Link>, peer: &Arc<Peer>) {
        let calls = link.take_calls(calls);
        if calls.is_empty() {
            return;
        }
        let together = Arc::new(AtomicUsize::new(calls.len()));
        let scopes = calls.into_iter().map(|call| ToolScope {
            over: link.start(&call.call_id, together.clone()),
            message: Arc::new(call),
            link: link.clone(),
            peer: peer.clone(),
            began: Instant::now(),
            asked: Arc::default(),
        });
        let queue = Arc::new(Mutex::new(scopes.collect::<VecDeque<_>>()));
        let take =
            |queue: &Mutex<VecDeque<_>>| queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).pop_front();
        let (tools, handlers) = (self.clone(), peer.handlers().clone());
        if together.load(Ordering::Relaxed) > 1 {
            let (tools, queue) = (tools.clone(), queue.clone());
            tokio::spawn(async move {
                sleep(QUICK).await;
                while let Some(scope) = take(&queue) {
                    let (link, id) = (scope.link.clone(), scope.message.call_id.clone());
                    link.run(&id, || handlers.spawn(tools.clone().run(scope)).abort_handle());
                }
            });
        }
        peer.handlers().spawn(async move {
            while let Some(scope) = take(&queue) {
                let (link, id) = (scope.link.clone(), scope.message.call_id.clone());
                let mut run = Box::pin(tools.clone().run(scope));
                if !poll_fn(|context| Poll::Ready(run.as_mut().poll(context).is_ready())).await {
                    link.run(&id, || tokio::spawn(run).abort_handle());
                }
            }
        });
    }

    /// Runs the handler of a call and answers it, unless it is over already.
    async fn run(self: Arc<Self>, scope: ToolScope) {
        let (link, message) = (scope.link.clone(), scope.message.clone());
        if scope.over.is_cancelled() {
            return;
        }
        let result = match AssertUnwindSafe(self.reply(scope)).catch_unwind().await {
            Ok(Ok(Reply { output_json, content })) => ToolResult { output_json, content, ..Default::default() },
            Ok(Err(problem)) => failure(problem),
            Err(panic) => CallError::tool("panic", panic_text(&*panic)).into(),
        };
        link.answer(&message.call_id, result);
    }

    async fn reply(&self, scope: ToolScope) -> Result<Reply, BoxError> {
        let message = scope.message.clone();
        let json = if message.arguments_json.is_empty() { "{}" } else { &message.arguments_json };
        let handler = self.offered().get(&message.name).map(|each| each.handler.clone());
        match handler {
            Some(handler) if json.trim_start().starts_with('{') => handler(json.to_owned(), scope).await,
            Some(_) => {
                let text = format!("the arguments must be a JSON object, they are {json:.80}");
                not_run(ErrorCode::InvalidArguments, text)
            }
            None => not_run(ErrorCode::NotFound, format!("this plugin has no tool '{}'", message.name)),
        }
    }
}

/// Returns the result of a handler that failed or asked.
fn failure(problem: BoxError) -> ToolResult {
    if let Some(Stop(result)) = problem.downcast_ref() {
        return result.clone();
    }
    let reason = problem.downcast_ref::<CallError>().map_or("", |error| &error.reason);
    let text: String = problem.to_string().chars().take(ERROR_CHARACTERS).collect();
    CallError::tool(reason, if text.is_empty() { "the tool failed" } else { &text }).into()
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "the tool panicked".into())
}
