//! Holds the state of one stream: its outbox, both tables of calls, its limits, its end. A new stream begins with a new
//! link, so that nothing of an old one can reach it.
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use prost::Message;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::pb::*;

const MESSAGE_ITEMS: usize = 128;
const MESSAGE_BYTES: usize = 1024 * 1024;
const PREFIX: usize = 6; // bytes of an item in a message beside its own, at most
const MARGIN: usize = 1024; // bytes of a message that its one item must leave free
const HOLD: Duration = Duration::from_millis(1); // that the results of calls of one message may wait for each other
const LEAVE: Duration = Duration::from_secs(2); // for the bus to end the stream after our drain, and again after our half-close
const ATTACH: Duration = Duration::from_secs(10); // for connecting, and for the answer to the attach
const MISSED_HEARTBEATS: u32 = 4; // after so many intervals without a message the bus counts as lost
const TICK: Duration = Duration::from_millis(500); // between two looks at the clock; later by as much means a standstill
const LEAVING_TICK: Duration = Duration::from_millis(50);

/// What a call of our own has where the bus has not read it, or will not begin it: nothing; else its result.
pub(crate) type Outcome = Option<ToolResult>;

pub(crate) type OnProgress = Arc<dyn Fn(ToolProgress) + Send + Sync>;

/// A call of our own that the bus has not answered.
struct Pending {
    reply: oneshot::Sender<Outcome>,
    on_progress: Option<OnProgress>,
    accepted: bool, // whether progress has shown that a plugin works on it
    given_up: bool,
    _slot: OwnedSemaphorePermit,
}

/// A call that we answer.
struct Run {
    task: Option<AbortHandle>, // None before it is spawned
    over: CancellationToken,
    together: Arc<AtomicUsize>, // how many calls of its message have no result yet
}

impl Run {
    fn abort(&self) {
        self.task.iter().for_each(AbortHandle::abort);
    }
}

/// The parts of a link that change, under one lock.
pub(crate) struct State {
    messages: VecDeque<InvokeRequest>, // to write; the last one is filled
    items: usize,                      // of the last one
    bytes: usize,                      // of the last one
    hold: Option<Instant>,             // until when what waits, all of it results, waits for others
    closed: bool,                      // whether further items are dropped
    running: HashMap<String, Run>,     // by the bus's id
    pending: HashMap<String, Pending>, // by our id
    ids: u64,
    pub attached: Option<Instant>, // when the bus accepted us; None before
    pub limits: Limits,            // those of the bus, or the defaults
    pub declared: VecDeque<u64>,   // the versions of the tools in attaches that the bus has not answered
    pub version: u64,              // the version of the tools in the newest attach
    pub pages: Vec<Vec<Tool>>,     // tools of that attach that did not fit into it
    pub drain_received: bool,
    drain_sent: bool,
    idle_since: Option<Instant>, // since when a leaving peer owes nothing; None otherwise
    heartbeat: Duration,
    heard: Instant, // the start of the stream, or the bus's last message
    // After a standstill of this process, the bus may have ended the calls that are read next: they are held until the
    // bus has echoed a heartbeat, which it does after everything that it has sent before.
    held: Vec<ToolCall>,
    holding: bool,
    echoes: bool,
    sequence: u64,        // of our newest heartbeat
    due: Instant,         // when the clock is looked at next, at the latest
    wall_due: SystemTime, // the same by the clock that runs on in a suspended machine
}

impl State {
    pub fn leaving(&self) -> bool {
        self.drain_sent || self.drain_received
    }

    fn largest_item(&self) -> usize {
        self.limits.message_bytes as usize - MARGIN
    }
}

/// One stream, from its attach to its end.
pub(crate) struct Link {
    state: Mutex<State>,
    ready: Notify,               // there is something to write
    pub slots: Arc<Semaphore>,   // of calls in flight; none before the bus has accepted us, closed with the stream
    pub over: CancellationToken, // this side gives the stream up
}

impl Link {
    pub fn new(max_in_flight: u32) -> Arc<Link> {
        let calls_in_flight = if max_in_flight == 0 { 256 } else { max_in_flight };
        let limits = Limits {
            message_bytes: 16 << 20,
            calls_in_flight,
            arguments_bytes: 1 << 20,
            result_bytes: 4 << 20,
            ..Default::default()
        };
        let state = State {
            messages: VecDeque::new(),
            items: 0,
            bytes: 0,
            hold: None,
            closed: false,
            running: HashMap::new(),
            pending: HashMap::new(),
            ids: 0,
            attached: None,
            limits,
            declared: VecDeque::new(),
            version: 0,
            pages: Vec::new(),
            drain_received: false,
            drain_sent: false,
            idle_since: None,
            heartbeat: Duration::from_secs(10),
            heard: Instant::now(),
            held: Vec::new(),
            holding: false,
            echoes: false,
            sequence: 0,
            due: Instant::now() + 2 * TICK,
            wall_due: SystemTime::now() + 2 * TICK,
        };
        let slots = Arc::new(Semaphore::new(0));
        Arc::new(Link { state: Mutex::new(state), ready: Notify::new(), slots, over: CancellationToken::new() })
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Takes the bus's first answer, and with it the limits; what is unset has its default.
    pub fn open(&self, attached: &Attached) {
        let mut state = self.state();
        state.attached = Some(Instant::now());
        let given = attached.limits.unwrap_or_default().encode_to_vec(); // without what is unset
        let _ = state.limits.merge(&*given);
        if attached.heartbeat_seconds > 0.0 {
            state.heartbeat = Duration::from_secs_f64(attached.heartbeat_seconds);
        }
        state.echoes = attached.echoes;
        self.slots.add_permits(state.limits.calls_in_flight as usize);
    }

    // -- the outbox --------------------------------------------------------------------------------------------------

    /// Sends an item of so many bytes of which a message can have one.
    pub fn put(&self, bytes: usize, item: impl FnOnce(&mut InvokeRequest)) {
        self.put_into(&mut self.state(), bytes, item);
    }

    fn put_into(&self, state: &mut State, bytes: usize, item: impl FnOnce(&mut InvokeRequest)) {
        state.items = MESSAGE_ITEMS; // so that it begins a message
        self.add(state, bytes, item, false);
    }

    /// Adds an item of so many bytes to the newest message or another one; drops it if the stream is over. With `hold` it
    /// may wait a moment for others, which follow.
    fn add(&self, state: &mut State, bytes: usize, item: impl FnOnce(&mut InvokeRequest), hold: bool) {
        if state.closed {
            return;
        }
        let held = state.hold.is_some();
        if hold && (held || state.messages.is_empty()) {
            state.hold.get_or_insert_with(|| Instant::now() + HOLD);
        } else {
            state.hold = None;
        }
        let bytes = bytes + PREFIX;
        if state.messages.is_empty() || state.items >= MESSAGE_ITEMS || state.bytes + bytes > MESSAGE_BYTES {
            state.messages.push_back(InvokeRequest::default());
            (state.items, state.bytes) = (0, 0);
        }
        item(state.messages.back_mut().expect("there is one now"));
        (state.items, state.bytes) = (state.items + 1, state.bytes + bytes);
        if !(held && state.hold.is_some()) {
            self.ready.notify_one();
        }
    }

    /// Returns the next message; None after the last one.
    pub async fn next(&self) -> Option<InvokeRequest> {
        loop {
            let hold = {
                let mut state = self.state();
                match state.hold.filter(|moment| *moment > Instant::now() && !state.closed) {
                    None => {
                        state.hold = None;
                        match state.messages.pop_front() {
                            None if state.closed => return None,
                            None => None,
                            message => return message,
                        }
                    }
                    hold => hold,
                }
            };
            match hold {
                Some(moment) => tokio::select! { _ = self.ready.notified() => (), _ = sleep_until(moment) => () },
                None => self.ready.notified().await,
            }
        }
    }

    // -- calls that we answer ------------------------------------------------------------------------------------------

    /// Returns the calls of a message that begin now, not those that are held.
    pub fn take_calls(&self, calls: Vec<ToolCall>) -> Vec<ToolCall> {
        let mut state = self.state();
        if !state.holding {
            return calls;
        }
        state.held.extend(calls);
        Vec::new()
    }

    /// Notes a call that is about to be answered; returns what is cancelled when it is over.
    pub fn start(&self, id: &str, together: Arc<AtomicUsize>) -> CancellationToken {
        let over = CancellationToken::new();
        let run = Run { task: None, over: over.clone(), together };
        let mut state = self.state();
        if state.closed {
            over.cancel();
        } else {
            state.running.insert(id.to_owned(), run);
        }
        over
    }

    /// Spawns the task of a call, unless the call is over.
    pub fn run(&self, id: &str, spawn: impl FnOnce() -> AbortHandle) {
        if let Some(run) = self.state().running.get_mut(id) {
            run.task = Some(spawn());
        }
    }

    /// Sends progress of a call, unless the call is over; returns why the bus cannot carry it.
    pub fn report(&self, progress: ToolProgress) -> Result<(), String> {
        let mut state = self.state();
        let (bytes, limit) = (progress.encoded_len(), state.largest_item().min(state.limits.result_bytes as usize));
        if bytes > limit {
            return Err(format!("progress is left out: it has {bytes} bytes, at most {limit}"));
        }
        if state.running.contains_key(&progress.call_id) {
            self.add(&mut state, bytes, |message| message.progress.push(progress), false);
        }
        Ok(())
    }

    /// Sends the result of a call, once; it may wait a moment for the other results of its message.
    pub fn answer(&self, id: &str, result: ToolResult) {
        let mut state = self.state();
        if let Some(run) = state.running.remove(id) {
            run.over.cancel();
            let last = run.together.fetch_sub(1, Ordering::AcqRel) == 1;
            let result = ToolResult { call_id: id.to_owned(), ..checked(result, &state) };
            self.add(&mut state, result.encoded_len(), |message| message.results.push(result), !last);
            self.settle(&mut state);
        }
    }

    /// Stops a call and answers it. An unknown id is ignored.
    pub fn cancel(&self, id: &str) {
        let mut state = self.state();
        if let Some(run) = state.running.get(id) {
            run.abort();
            drop(state);
            self.answer(id, CallError::new(ErrorCode::Cancelled, CallStage::Accepted, "the call was cancelled").into());
        } else if let Some(at) = state.held.iter().position(|call| call.call_id == id) {
            state.held.remove(at);
            let text = "the call was cancelled before it began";
            let error = CallError::new(ErrorCode::Cancelled, CallStage::NotDispatched, text);
            let result = ToolResult { call_id: id.to_owned(), ..error.into() };
            self.add(&mut state, result.encoded_len(), |message| message.results.push(result), false);
        }
    }

    // -- calls of our own ----------------------------------------------------------------------------------------------

    /// Sends a call; returns its id and where its outcome comes, or why it would break a limit of the bus.
    pub fn send(
        &self,
        mut call: ToolCall,
        slot: OwnedSemaphorePermit,
        on_progress: Option<OnProgress>,
    ) -> Result<(String, oneshot::Receiver<Outcome>), Box<CallError>> {
        let mut state = self.state();
        let parent = &call.parent_call_id;
        if !parent.is_empty() && !state.running.contains_key(parent) {
            let text = "the call that made this one has ended";
            return Err(Box::new(CallError::new(ErrorCode::Cancelled, CallStage::NotDispatched, text)));
        }
        state.ids += 1;
        let id = format!("c{}", state.ids);
        call.call_id.clone_from(&id);
        for (name, bytes, limit) in [
            ("arguments_bytes", call.arguments_json.len(), state.limits.arguments_bytes as usize),
            ("message_bytes", call.encoded_len(), state.largest_item()),
        ] {
            if bytes > limit {
                let text = format!("the call has {bytes} bytes, more than the limit {name} = {limit}: send less");
                let error = CallError::new(ErrorCode::InvalidArguments, CallStage::NotDispatched, text);
                return Err(Box::new(error.limit(name, limit as f64)));
            }
        }
        let (reply, outcome) = oneshot::channel();
        if state.closed {
            let _ = reply.send(None);
        } else {
            let pending = Pending { reply, on_progress, accepted: false, given_up: false, _slot: slot };
            state.pending.insert(id.clone(), pending);
            self.add(&mut state, call.encoded_len(), |message| message.calls.push(call), false);
        }
        Ok((id, outcome))
    }

    /// Cancels a call whose maker has given it up; returns whether a plugin works on it. It counts as in flight until the
    /// bus has answered.
    pub fn give_up(&self, id: &str, reason: &str) -> bool {
        let mut state = self.state();
        let Some(pending) = state.pending.get_mut(id) else { return false };
        let accepted = pending.accepted;
        pending.on_progress = None;
        if !std::mem::replace(&mut pending.given_up, true) {
            let cancel = ToolCancel { call_id: id.into(), reason: reason.into() };
            self.add(&mut state, cancel.encoded_len(), |message| message.cancels.push(cancel), false);
        }
        accepted
    }

    /// Takes progress of calls of ours; returns what is to be told to their makers.
    pub fn progressed(&self, items: Vec<ToolProgress>) -> Vec<(OnProgress, ToolProgress)> {
        let mut state = self.state();
        let mut heard = Vec::new();
        for item in items {
            if let Some(pending) = state.pending.get_mut(&item.call_id) {
                pending.accepted = true;
                heard.extend(pending.on_progress.clone().map(|on_progress| (on_progress, item)));
            }
        }
        heard
    }

    /// Takes results of calls of ours.
    pub fn answered(&self, results: Vec<ToolResult>) {
        let mut state = self.state();
        for result in results {
            if let Some(pending) = state.pending.remove(&result.call_id) {
                let _ = pending.reply.send(Some(result));
            }
        }
    }

    // -- standstills, silence and the end ------------------------------------------------------------------------------

    /// Looks at the clocks and at what is due; returns why the stream is to be given up.
    pub fn look(&self) -> Option<String> {
        let mut state = self.state();
        self.look_at_clocks(&mut state);
        let silence = if state.attached.is_none() { ATTACH } else { MISSED_HEARTBEATS * state.heartbeat };
        if state.heard.elapsed() > silence {
            return Some(format!("the bus has sent nothing for {silence:?}"));
        }
        let idle = state.idle_since.map_or(Duration::ZERO, |since| since.elapsed());
        if idle > LEAVE {
            self.close(&mut state);
        }
        (idle > 2 * LEAVE).then(|| "the bus does not end the stream".into())
    }

    pub fn tick(&self) -> Duration {
        if self.state().idle_since.is_some() { LEAVING_TICK } else { TICK }
    }

    /// Notes that a message came.
    pub fn hear(&self) {
        let mut state = self.state();
        self.look_at_clocks(&mut state);
        state.heard = Instant::now();
    }

    fn look_at_clocks(&self, state: &mut State) {
        let (now, wall) = (Instant::now(), SystemTime::now());
        if now > state.due || wall > state.wall_due {
            state.heard = now; // what came meanwhile waits in the socket
            if state.echoes {
                state.holding = true;
                state.sequence += 1;
                let heartbeat = Heartbeat { sequence: state.sequence, from_peer: true };
                self.put_into(state, heartbeat.encoded_len(), |message| message.heartbeat = Some(heartbeat));
            }
        }
        (state.due, state.wall_due) = (now + 2 * TICK, wall + 2 * TICK);
    }

    /// Takes the echo of a heartbeat of ours; returns the calls that may begin now.
    pub fn echoed(&self, sequence: u64) -> Vec<ToolCall> {
        let mut state = self.state();
        if sequence != state.sequence {
            return Vec::new();
        }
        state.holding = false;
        std::mem::take(&mut state.held)
    }

    /// Sends the bus a drain, once.
    pub fn drain(&self, reason: &str) {
        let mut state = self.state();
        if !state.drain_sent {
            let drain = Drain { reason: reason.into(), grace_seconds: 0.0 };
            self.put_into(&mut state, drain.encoded_len(), |message| message.drain = Some(drain));
            state.drain_sent = true;
            self.settle(&mut state);
        }
    }

    /// Takes the next step towards the end of the stream; called after each message and each end of a call.
    ///
    /// After our own drain the bus ends the stream: it may have sent a call before it read the drain.
    pub fn when_idle(&self) {
        self.settle(&mut self.state());
    }

    fn settle(&self, state: &mut State) {
        let idle = state.running.is_empty() && state.pending.is_empty() && state.held.is_empty();
        if !state.leaving() || !idle {
            state.idle_since = None;
        } else if state.drain_received {
            self.close(state);
        } else {
            state.idle_since.get_or_insert_with(Instant::now);
        }
    }

    /// Lets the writer send what waits, and then half-close.
    fn close(&self, state: &mut State) {
        state.closed = true;
        self.ready.notify_one();
    }

    /// Ends everything, after the end of the stream: handlers are stopped, since nobody waits for their results.
    pub fn end(&self, all_read: bool) {
        self.slots.close();
        let mut state = self.state();
        self.close(&mut state);
        state.held.clear();
        for (_, run) in state.running.drain() {
            run.abort();
            run.over.cancel();
        }
        let unwritten: HashSet<String> =
            state.messages.drain(..).flat_map(|message| message.calls).map(|call| call.call_id).collect();
        for (id, Pending { reply, accepted, .. }) in state.pending.drain() {
            let stage = if accepted { CallStage::Accepted } else { CallStage::Unknown };
            let unread = all_read || unwritten.contains(&id);
            let _ = reply.send((!unread).then(|| broken(stage).into()));
        }
    }
}

/// Returns how a call ends with its stream.
pub(crate) fn broken(stage: CallStage) -> CallError {
    CallError::new(ErrorCode::Unavailable, stage, "the connection to the bus broke")
}

/// Returns the result, or a failure in place of one that breaks a limit and so would end the stream.
fn checked(result: ToolResult, state: &State) -> ToolResult {
    let content: usize = result.content.iter().map(|part| part.encoded_len()).sum();
    let bytes = content + result.output_json.len() + result.input_requests_json.len() + result.request_state.len();
    let limit = state.limits.result_bytes as usize;
    if bytes <= limit && result.encoded_len() <= state.largest_item() {
        return result;
    }
    let text = format!("the result has {bytes} bytes, more than the limit result_bytes = {limit}: ask for less");
    let error = CallError::new(ErrorCode::ResultTooLarge, CallStage::Accepted, text);
    error.limit("result_bytes", limit as f64).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_follows_a_large_attach_is_not_in_its_message() {
        let link = Link::new(0);
        let attach = Attach { notices: vec!["x".repeat(MESSAGE_BYTES)], ..Default::default() };
        link.put(attach.encoded_len(), |message| message.attach = Some(attach));
        link.start("1", Arc::new(AtomicUsize::new(1)));
        link.answer("1", ToolResult { output_json: "\"y\"".into(), ..Default::default() });
        let messages = (link.next().await.unwrap(), link.next().await.unwrap());
        assert_eq!((messages.0.attach.is_some(), messages.0.results.len(), messages.1.results.len()), (true, 0, 1));
    }
}
