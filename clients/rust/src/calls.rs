//! Makes the calls of a peer, its own and the nested ones of its handlers: each ends in exactly one result.
//!
//! A call waits here for a stream and for room on it, and is sent again where that is safe, until its deadline. Once it is
//! with the bus, the bus measures its time; a second later it ends here, in case the bus hangs.
use std::future::{Future, IntoFuture};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::link::{Link, OnProgress, Outcome, broken};
use crate::pb::*;
use crate::peer::Peer;
use crate::values::random;

const DEFAULT: Duration = Duration::from_secs(30); // the time of a call that names none
const MAX: Duration = Duration::from_secs(300); // the longest of any call
const SLACK: Duration = Duration::from_secs(1); // that the bus's answer may be late
const LATE: Duration = Duration::from_millis(500); // a timer later than this shows that the process stood still
const PROMPT: Duration = Duration::from_millis(5); // a call that is sent within this time states the caller's own timeout
const FIRST_PAUSE: Duration = Duration::from_millis(10); // before a refused call is sent again: the upper end, which doubles
const MAX_PAUSE: Duration = Duration::from_secs(1);
const ROUNDS: usize = 10; // of questions of one call

pub(crate) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;
type OnInput = Arc<dyn Fn(AskedQuestion) -> BoxFuture<Option<Value>> + Send + Sync>;

/// A question of a tool to its caller.
#[derive(Clone, Debug)]
pub struct AskedQuestion {
    /// Names the question among those of its call.
    pub key: String,
    /// `elicitation/create`, or another method of the Model Context Protocol.
    pub method: String,
    /// What the method takes: for a form `message` and `requestedSchema`, for a page `message` and `url`.
    pub params: Value,
}

impl AskedQuestion {
    /// Returns the text for the person who is asked.
    pub fn message(&self) -> &str {
        self.params["message"].as_str().unwrap_or_default()
    }
}

/// A call that is about to be made: `.await` makes it and gives its [`ToolResult`], also that of a failure.
///
/// Whoever drops the future gives up the call, down to its handler.
pub struct Call {
    pub(crate) peer: Arc<Peer>,
    pub(crate) call: Result<ToolCall, CallError>,
    pub(crate) parent: Option<(Arc<Link>, CancellationToken)>, // where it is part of another call
    on_progress: Option<OnProgress>,
    on_input: Option<OnInput>,
}

impl Call {
    pub(crate) fn new(peer: Arc<Peer>, name: String, arguments: Result<String, CallError>) -> Self {
        let call = arguments.map(|arguments_json| ToolCall { name, arguments_json, ..Default::default() });
        Call { peer, call, parent: None, on_progress: None, on_input: None }
    }

    /// Sets fields of the call for which there is no method here.
    pub fn with(mut self, set: impl FnOnce(&mut ToolCall)) -> Self {
        if let Ok(call) = &mut self.call {
            set(call);
        }
        self
    }

    /// States how long to wait, in place of the tool's own timeout. More than 300 s count as 300.
    pub fn timeout(self, time: Duration) -> Self {
        self.with(|call| call.timeout_seconds = time.as_secs_f64().max(f64::MIN_POSITIVE))
    }

    /// Makes the call a task after so long: the result then has its `task_id`.
    pub fn background_after(self, time: Duration) -> Self {
        self.with(|call| call.background_after_seconds = time.as_secs_f64().max(f64::MIN_POSITIVE))
    }

    /// Considers only the tools of a role.
    pub fn role(self, role: impl Into<String>) -> Self {
        self.with(|call| call.role = Some(role.into()))
    }

    /// States the user and the conversation, for the tool; a model cannot set them. Only calls of a host have them.
    pub fn context(self, context: CallContext) -> Self {
        self.with(|call| call.context = Some(context))
    }

    /// Names the declaration that the caller knows: the call is refused once the tool has changed.
    pub fn schema_hash(self, hash: impl Into<String>) -> Self {
        self.with(|call| call.schema_hash = hash.into())
    }

    /// Takes progress, chunks and content that come before the result. It is called between two messages: be quick.
    pub fn on_progress(mut self, on_progress: impl Fn(ToolProgress) + Send + Sync + 'static) -> Self {
        self.on_progress = Some(Arc::new(on_progress));
        self
    }

    /// Answers the questions of the tool, and makes the call again with the answers, 10 times at most. An answer is the
    /// fields of the form, or a whole answer with its `action`; None says that no choice was made.
    pub fn on_input<F, A>(mut self, on_input: F) -> Self
    where
        F: Fn(AskedQuestion) -> A + Send + Sync + 'static,
        A: Future<Output = Option<Value>> + Send + 'static,
    {
        self.on_input = Some(Arc::new(move |question| Box::pin(on_input(question))));
        self.with(|call| {
            call.context.get_or_insert_default();
            call.accepts.push("elicitation.form".into());
        })
    }

    async fn make(self) -> ToolResult {
        let mut call = match self.call {
            Ok(call) => call,
            Err(error) => return error.into(),
        };
        for _ in 0..ROUNDS {
            let result = self.peer.call(call.clone(), self.parent.as_ref(), self.on_progress.clone()).await;
            let Some(on_input) = self.on_input.as_ref().filter(|_| result.asks()) else { return result };
            let questions: Value = serde_json::from_str(&result.input_requests_json).unwrap_or_default();
            let mut answers = serde_json::Map::new();
            for (key, question) in questions.as_object().into_iter().flatten() {
                let method = question["method"].as_str().unwrap_or_default().to_owned();
                let form = method == "elicitation/create";
                let asked = AskedQuestion { key: key.clone(), method, params: question["params"].clone() };
                let answer = match on_input(asked).await {
                    None => json!({"action": "cancel"}),
                    Some(fields) if form && fields.get("action").is_none() => {
                        json!({"action": "accept", "content": fields})
                    }
                    Some(answer) => answer,
                };
                answers.insert(key.clone(), answer);
            }
            call.input_responses_json = Value::Object(answers).to_string();
            call.request_state = result.request_state;
        }
        let text = format!("the tool has asked {ROUNDS} times, which is the limit of this client");
        CallError::tool("needs_input", text).into()
    }
}

impl IntoFuture for Call {
    type Output = ToolResult;
    type IntoFuture = BoxFuture<ToolResult>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.make())
    }
}

/// A call that is with the bus; dropping it gives it up.
struct Sent {
    link: Arc<Link>,
    id: String,
    outcome: oneshot::Receiver<Outcome>,
}

impl Drop for Sent {
    fn drop(&mut self) {
        self.link.give_up(&self.id, "cancelled"); // without effect on one that has its outcome
    }
}

impl Peer {
    async fn call(
        self: &Arc<Self>,
        call: ToolCall,
        parent: Option<&(Arc<Link>, CancellationToken)>,
        on_progress: Option<OnProgress>,
    ) -> ToolResult {
        let (over, text) = match parent {
            Some((_, over)) => (over, "the call that made this one has ended"),
            None => (&self.closed, "this host has left the bus"),
        };
        tokio::select! {
            biased;
            _ = over.cancelled() => CallError::new(ErrorCode::Cancelled, CallStage::Unknown, text).into(),
            result = self.attempts(call, parent.map(|(link, _)| link), on_progress) => result,
        }
    }

    /// Sends a call until it has a result that is not sent again.
    async fn attempts(
        &self,
        call: ToolCall,
        parent: Option<&Arc<Link>>,
        on_progress: Option<OnProgress>,
    ) -> ToolResult {
        let started = Instant::now();
        let named =
            if call.background_after_seconds > 0.0 { call.background_after_seconds } else { call.timeout_seconds };
        let named = (named > 0.0).then(|| Duration::try_from_secs_f64(named).unwrap_or(MAX));
        let deadline = started + named.unwrap_or(DEFAULT);
        let longest = named.unwrap_or(MAX).min(MAX);
        let mut refusal: Option<ToolResult> = None; // the newest of the bus
        for attempt in 0.. {
            let found = before(deadline, self.slot(parent)).await;
            let retry_safe = found.is_none() && parent.is_none();
            let (link, slot) = match found.unwrap_or_else(|| Err("no bus took the call in time".into())) {
                Ok(found) => found,
                Err(text) => {
                    let none = CallError::new(ErrorCode::Unavailable, CallStage::NotDispatched, text);
                    return refusal.unwrap_or_else(|| CallError { retry_safe, ..none }.into());
                }
            };
            let mut newest = call.clone();
            let waited = started.elapsed();
            for seconds in [&mut newest.timeout_seconds, &mut newest.background_after_seconds] {
                if *seconds > 0.0 && waited > PROMPT {
                    *seconds = (*seconds - waited.as_secs_f64()).max(0.001);
                }
            }
            let mut sent = match link.send(newest, slot, on_progress.clone()) {
                Ok((id, outcome)) => Sent { link, id, outcome },
                Err(fault) => return (*fault).into(),
            };
            let result = match before(started + longest + SLACK, &mut sent.outcome).await {
                Some(Ok(Some(result))) => result,
                Some(Ok(None)) if parent.is_none() => continue,
                Some(Ok(None)) => return broken(CallStage::NotDispatched).into(),
                Some(Err(_)) => return broken(CallStage::Unknown).into(),
                None => {
                    let accepted = sent.link.give_up(&sent.id, "timeout_seconds");
                    let stage = if accepted { CallStage::Accepted } else { CallStage::Unknown };
                    let text = format!("the bus gave no answer within {longest:?}: it hangs");
                    let error = CallError::new(ErrorCode::DeadlineExceeded, stage, text);
                    return error.limit("timeout_seconds", longest.as_secs_f64()).into();
                }
            };
            let error = result.error.clone().unwrap_or_default();
            if error.code() == ErrorCode::NotFound && attempt > 0 {
                return refusal.unwrap_or(result); // the tool was offline, and is forgotten now
            }
            if !error.retry_safe || !matches!(error.code(), ErrorCode::Unavailable | ErrorCode::Overloaded) {
                return result;
            }
            let upper = MAX_PAUSE.min(FIRST_PAUSE * 2u32.pow(attempt.min(10)));
            let hint = Duration::try_from_secs_f64(error.retry_after_seconds).unwrap_or_default();
            let pause = hint.max(upper.mul_f64(random() as f64 / u64::MAX as f64));
            if Instant::now() + pause >= deadline {
                return result;
            }
            refusal = Some(result);
            sleep(pause).await;
        }
        unreachable!("attempts end by a return")
    }

    /// Waits for a stream, that of the parent of a nested call, and for room on it; the error says why there will be none.
    async fn slot(&self, parent: Option<&Arc<Link>>) -> Result<(Arc<Link>, OwnedSemaphorePermit), String> {
        let mut changed = self.changed.subscribe();
        loop {
            changed.mark_unchanged();
            let link = match parent {
                Some(link) => Some(link.clone()),
                None => match self.state() {
                    state if state.left.is_some() => return Err(state.left.clone().unwrap_or_default()),
                    state => state.route.clone(),
                },
            };
            let Some(link) = link else {
                let _ = changed.changed().await;
                continue;
            };
            tokio::select! {
                slot = link.slots.clone().acquire_owned() => match slot {
                    Ok(slot) => return Ok((link, slot)),
                    Err(_) if parent.is_some() => return Err(broken(CallStage::Unknown).message),
                    Err(_) => (),
                },
                _ = changed.changed(), if parent.is_none() => (),
            }
        }
    }
}

/// Runs a future until a moment. Where the process stood still, the answer may wait in the socket: that is read first.
async fn before<F: Future>(mut moment: Instant, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    loop {
        tokio::select! {
            biased;
            output = &mut future => return Some(output),
            _ = sleep_until(moment) => match moment.elapsed() {
                late if late < LATE => return None,
                _ => moment = Instant::now() + SLACK,
            },
        }
    }
}
