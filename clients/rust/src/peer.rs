//! Connects one peer to the bus: attaches, reads, reconnects with backoff, leaves; in the order of docs/protocol.md.
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use futures_util::FutureExt;
use prost::Message;
use tokio::runtime::{Builder, Handle};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::addresses::Addresses;
use crate::link::Link;
use crate::pb::event::Kind;
use crate::pb::*;
use crate::tools::Tools;
use crate::values::{Error, Result, random};
use crate::wire::{Credential, Wire, end_of, read_credential, why_unanswered};

const ADDRESS: &str = "127.0.0.1:48930";
const STEADY: Duration = Duration::from_secs(1); // a session that lived so long resets the backoff
const ATTACH_BYTES: usize = 12 << 20; // of the tools in one request; those that do not fit follow by Register
const FAREWELL: Duration = Duration::from_millis(20); // for the connection to tell the bus that a stream is given up
const LOOK: Duration = Duration::from_secs(1); // at a server that is there and does not answer
const REGISTER: Duration = Duration::from_secs(300);
const EXPIRY_SECONDS: f64 = 7.0 * 86_400.0; // before a key expires: then a warning is logged
const MAX_UNREAD: usize = 1000; // items of a subscription that wait for their reader

/// Runs the streams of all peers, on a thread of its own: a handler that blocks its thread delays no heartbeat.
static STREAMS: LazyLock<Handle> = LazyLock::new(|| {
    let runtime = Builder::new_current_thread().enable_all().build().expect("the system gives a program an event loop");
    let handle = runtime.handle().clone();
    let run = move || runtime.block_on(std::future::pending::<()>());
    std::thread::Builder::new().name("toolbus".into()).spawn(run).expect("the system gives a program a thread");
    handle
});

/// Takes a warning for the author.
pub type Log = Arc<dyn Fn(&str) + Send + Sync>;

/// What plugins and hosts can state about their connection; what is left out has its default.
#[derive(Clone, Default)]
pub struct Options {
    /// `HOST:PORT`, `unix:PATH`, `tls:HOST:PORT`, `mtls:HOST:PORT`, `dns:` before a name for every bus that DNS has for it,
    /// or several of them, separated by commas; by default TOOLBUS_ADDRESS, then the credential's, then
    /// `127.0.0.1:48930`. A plugin attaches to all, a host to one at a time.
    pub address: String,
    /// The file that proves who this peer is, to a bus on another machine; by default TOOLBUS_CREDENTIAL.
    pub credential: String,
    /// Binds the source: while it is in use, only processes with the same token may use it; by default TOOLBUS_TOKEN.
    pub token: String,
    /// Names the process, so that its new connection replaces its old one; by default random.
    pub instance: String,
    /// Calls at once; 256 by default.
    pub max_in_flight: u32,
    /// Lists the tools as `source:name`, so that they never collide with another plugin's.
    pub qualified: bool,
    /// Texts for operators, which `toolbus list` shows.
    pub notices: Vec<String>,
    /// Offers none of the tools if the bus refuses one of them.
    pub all_or_none: bool,
    /// Takes warnings for the author; by default they go to standard error.
    pub log: Option<Log>,
}

impl Options {
    pub(crate) fn warn(&self, text: &str) {
        match &self.log {
            Some(log) => log(text),
            None => eprintln!("toolbus: {text}"),
        }
    }
}

/// Names a tool among those of a source, by its role and its name.
type Key = (String, String);

#[derive(Default)]
pub(crate) struct State {
    refused: HashMap<Key, RefusedTool>,
    waiting: HashMap<Key, WaitingTool>,
    noted: HashMap<Key, String>, // what was logged about these tools; of a refusal of all, under an empty name
    catalog: BTreeMap<Key, ListedTool>, // all that a watch has brought, by source and name
    pub changes: VecDeque<CatalogChange>, // that were not read yet, as those below
    pub notifications: VecDeque<Notification>,
    // Why the last attempt at each address failed, as it was logged, and whether more is known; empty while attached.
    shown: HashMap<String, (String, bool)>,
    answered: Option<u64>,          // the version of the tools for which the bus has answered last
    wire: Option<Wire>,             // of the current stream
    credential: Option<Credential>, // of the newest connection
    unusable: String,               // why the file of the credential could not be used; empty where it could
    newest: u64,                    // the number of the newest notification
    pub route: Option<Arc<Link>>,   // where calls go; None without a session
    pub left: Option<String>,       // why there will be no stream any more; None while there may be
    fatal: Option<Error>,           // why the bus refused tools that are to be offered all or none
    ended: Option<Result<()>>,      // how `run` ended
}

impl State {
    /// Forgets what was logged about tools that the bus offers now.
    fn forget(&mut self) {
        self.noted.retain(|key, _| self.refused.contains_key(key) || self.waiting.contains_key(key));
    }
}

/// Holds one stream to a bus while it runs: offers tools, answers calls, makes calls.
pub(crate) struct Peer {
    source: String,
    options: Options,
    addresses: Addresses,
    subscription: Option<Subscription>,
    pub tools: Arc<Tools>,
    pub closed: CancellationToken, // calls of our own end now
    leaving: CancellationToken,
    hurry: CancellationToken, // calls in flight are not waited for
    begun: AtomicBool,
    handlers: OnceLock<Handle>, // where they run: the runtime in which the peer began
    state: Mutex<State>,
    pub changed: watch::Sender<()>, // the state
}

/// Returns the options with what the environment and the credential state, and the addresses.
pub(crate) fn complete(mut options: Options) -> Result<(Options, Addresses)> {
    for (value, name) in [
        (&mut options.credential, "TOOLBUS_CREDENTIAL"),
        (&mut options.address, "TOOLBUS_ADDRESS"),
        (&mut options.token, "TOOLBUS_TOKEN"),
    ] {
        if value.is_empty() {
            *value = std::env::var(name).unwrap_or_default();
        }
    }
    if options.address.is_empty() {
        options.address = read_credential(&options.credential)?.remove("address").unwrap_or_else(|| ADDRESS.into());
    }
    if options.instance.is_empty() {
        options.instance = format!("{:016x}{:016x}", random(), random());
    }
    let addresses = Addresses::parse(&options.address)?;
    Ok((options, addresses))
}

/// Refuses a source that breaks the rule of its name.
pub(crate) fn check_source(source: &str) -> Result<()> {
    let allowed = source.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.:-".contains(&byte));
    if source.is_empty() || source.len() > 128 || !allowed {
        return Err(Error::Setup(format!("the source is '{source}', it must be 1 to 128 of [A-Za-z0-9_.:-]")));
    }
    Ok(())
}

impl Peer {
    pub fn new(
        source: &str,
        options: Options,
        addresses: Addresses,
        tools: Arc<Tools>,
        subscription: Option<Subscription>,
    ) -> Result<Arc<Peer>> {
        check_source(source)?;
        Ok(Arc::new(Peer {
            source: source.into(),
            options,
            addresses,
            subscription,
            tools,
            closed: CancellationToken::new(),
            leaving: CancellationToken::new(),
            hurry: CancellationToken::new(),
            begun: AtomicBool::new(false),
            handlers: OnceLock::new(),
            state: Mutex::default(),
            changed: watch::Sender::new(()),
        }))
    }

    pub fn log(&self, text: &str) {
        self.options.warn(text);
    }

    pub fn handlers(&self) -> &Handle {
        self.handlers.get_or_init(Handle::current)
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn refused(&self) -> Vec<RefusedTool> {
        self.state().refused.values().cloned().collect()
    }

    pub fn waiting(&self) -> Vec<WaitingTool> {
        self.state().waiting.values().cloned().collect()
    }

    /// Returns the connection of the current session; None without one.
    pub fn wire(&self) -> Option<Wire> {
        let state = self.state();
        state.route.as_ref().and(state.wire.clone())
    }

    /// Runs in the background, unless it runs already or has left.
    pub fn begin(self: &Arc<Self>) {
        if !self.begun.swap(true, Ordering::AcqRel) {
            let peer = self.clone();
            self.handlers.get_or_init(Handle::current);
            STREAMS.spawn(async move {
                let fault = |_| Err(Error::Lost(Code::Internal, "the client has a fault: it panicked".into()));
                let ended = AssertUnwindSafe(peer.live()).catch_unwind().await.unwrap_or_else(fault);
                if let Err(problem) = &ended {
                    peer.log(&problem.to_string());
                    peer.close_route(format!("the bus refuses this peer: {problem}"));
                }
                peer.state().ended = Some(ended);
                peer.changed.send_replace(());
            });
        }
    }

    /// Shuts down gracefully: the bus sends no new calls, those in flight are finished, then the peer ends.
    pub fn leave(self: &Arc<Self>) {
        self.close_route("this peer has left the bus".into());
        self.leaving.cancel();
        if !self.begun.swap(true, Ordering::AcqRel) {
            self.state().ended = Some(Ok(())); // it never began
        }
        self.changed.send_replace(());
    }

    /// Waits for the end, at most so long; then gives the stream up.
    pub async fn ended(&self, grace: Duration) -> Result<()> {
        if timeout(grace, self.until(|_| false)).await.is_err() {
            self.hurry.cancel();
        }
        let _ = self.until(|_| false).await;
        self.state().ended.clone().unwrap_or(Ok(()))
    }

    /// Waits until the bus has answered for all tools as they are now.
    pub async fn declared(&self) -> Result<()> {
        self.until(|state| state.answered == Some(*self.tools.version.borrow())).await
    }

    /// Waits until a bus has accepted this peer.
    pub async fn connected(&self) -> Result<()> {
        self.until(|state| state.route.is_some()).await
    }

    /// Waits for the next item of a subscription; the error says why there will be none.
    pub async fn next<T>(&self, unread: fn(&mut State) -> &mut VecDeque<T>) -> Result<T> {
        let ended = self.until(|state| !unread(state).is_empty()).await;
        unread(&mut self.state()).pop_front().map_or_else(|| Err(ended.expect_err("else there is an item")), Ok)
    }

    async fn until(&self, condition: impl Fn(&mut State) -> bool) -> Result<()> {
        let mut changed = self.changed.subscribe();
        loop {
            {
                let mut state = self.state();
                match &state.ended {
                    Some(Err(problem)) => return Err(problem.clone()),
                    Some(Ok(())) => return Err(Error::Lost(Code::Unavailable, state.left.clone().unwrap_or_default())),
                    None => {
                        if condition(&mut state) {
                            return Ok(());
                        }
                    }
                }
            }
            let _ = changed.changed().await;
        }
    }

    fn close_route(&self, why: String) {
        let mut state = self.state();
        state.left.get_or_insert(why);
        state.route = None;
        self.changed.send_replace(());
    }

    // -- the life of the connection --------------------------------------------------------------------------------------

    async fn live(self: &Arc<Self>) -> Result<()> {
        let mut failures = 0; // attempts since the last steady session
        let mut key_ended = false; // whether the session before ended because the bus no longer accepts its key
        let mut addresses = self.addresses.clone();
        for attempt in 0.. {
            if self.state().left.is_some() {
                break;
            }
            let (address, (end, lived, connected)) = if let Err(problem) = self.look_up(&mut addresses).await {
                (self.options.address.as_str(), (problem, None, false))
            } else {
                let address = &addresses.known[attempt % addresses.known.len()];
                (address.as_str(), self.serve(address).await)
            };
            if let Some(problem) = self.state().fatal.take() {
                return Err(problem);
            }
            let (code, text) = match &end {
                Error::Setup(_) => return Err(end),
                Error::Refused(code, text) | Error::Lost(code, text) => (*code, text),
            };
            use Code::*;
            let again = lived.is_none() || key_ended && lived.is_some_and(|lived| lived < STEADY);
            key_ended = code == Unauthenticated;
            let last = matches!(
                code,
                InvalidArgument | FailedPrecondition | NotFound | PermissionDenied | AlreadyExists | Unimplemented
            );
            if last || key_ended && again {
                return Err(Error::Refused(code, self.why_refused(address, code, text)));
            }
            failures = if lived.is_some_and(|lived| lived >= STEADY) { 0 } else { failures };
            let (first, longest) = if matches!(code, ResourceExhausted | Internal) { (500, 10_000) } else { (50, 800) };
            let upper = Duration::from_millis(longest.min(first << failures.min(10)));
            if self.state().left.is_none() {
                self.explain(address, &end, longest, connected && lived.is_none()).await;
                if lived.is_none() && (attempt + 1) % addresses.known.len().max(1) != 0 {
                    continue; // another bus may be there
                }
                let _ = timeout(upper.mul_f64(random() as f64 / u64::MAX as f64), self.leaving.cancelled()).await;
            }
            failures += 1;
        }
        Ok(())
    }

    /// Looks up names of DNS, unless this peer leaves meanwhile.
    async fn look_up(&self, addresses: &mut Addresses) -> Result<()> {
        if !addresses.has_names() {
            return Ok(());
        }
        tokio::select! {
            found = addresses.look_up() => found,
            _ = self.leaving.cancelled() => Err(Error::Lost(Code::Cancelled, "this peer has left".into())),
        }
    }

    /// Returns the text of a bus that refuses this peer, with its address and what to do.
    fn why_refused(&self, address: &str, code: Code, text: &str) -> String {
        let why = match (code, self.options.credential.as_str()) {
            (Code::Unimplemented, _) => format!("it is not a toolbus, check the address: {text}"),
            (Code::Unauthenticated, "") => {
                format!("{text} (no credential: name its file in TOOLBUS_CREDENTIAL)")
            }
            (Code::Unauthenticated, path) => format!("{text} (the credential {path})"),
            _ => text.to_owned(),
        };
        format!("the bus at {address} refuses {}: {why}", self.source)
    }

    /// Logs why an attempt failed: each reason once, whatever times and ports it names.
    async fn explain(&self, address: &str, end: &Error, longest: u64, connected: bool) {
        let plain = |text: &str| text.replace(|letter: char| letter.is_ascii_digit(), "");
        let longest = longest as f64 / 1000.0;
        let text = format!("not attached to {address} ({end}): trying again, at least every {longest} s");
        let broke = matches!(end, Error::Lost(Code::Unavailable, _));
        if let Some((shown, explained)) = self.state().shown.get(address)
            && (plain(shown) == plain(&text) || broke && *explained)
        {
            return;
        }
        let why = match end {
            Error::Lost(Code::Unavailable, text) => {
                let look = why_unanswered(address, &self.options.credential, text, connected);
                timeout(LOOK, look).await.unwrap_or_default()
            }
            _ => None,
        };
        let explained = why.is_some();
        self.log(&why.map_or_else(|| text.clone(), |why| format!("{why}; trying again, at least every {longest} s")));
        self.state().shown.insert(address.into(), (text, explained));
    }

    /// Runs one stream from its attach to its end; returns its status, how long the session was live, if it was, and whether
    /// the bus ended it, once there was a connection.
    async fn serve(self: &Arc<Self>, address: &str) -> (Error, Option<Duration>, bool) {
        let link = Link::new(self.options.max_in_flight);
        let mut version = self.tools.version.subscribe();
        self.declare(&link);
        let stream = async {
            let mut credential = self.state().credential.clone();
            let (made, why) = Wire::renewed(address, &self.options.credential, &mut credential).await;
            let before = {
                let mut state = self.state();
                state.credential = credential;
                std::mem::replace(&mut state.unusable, why.clone())
            };
            if !why.is_empty() && why != before {
                self.log(&why);
            }
            let wire = made?;
            self.state().wire = Some(wire.clone());
            let messages = futures_util::stream::unfold(link.clone(), |link| async move {
                link.next().await.map(|message| (message, link))
            });
            let request = wire.request(messages);
            let mut client = wire.client;
            let mut incoming = client.invoke(request).await.map_err(|status| end_of(&status))?.into_inner();
            while let Some(message) = incoming.message().await.map_err(|status| end_of(&status))? {
                self.receive(message, &link);
            }
            Ok(())
        };
        let mut stream = Box::pin(stream);
        let lost = |text: String| Err(Error::Lost(Code::Unavailable, text));
        let (mut drained, mut given_up) = (false, true);
        let end = loop {
            tokio::select! {
                end = &mut stream => {
                    given_up = false;
                    break end;
                }
                _ = version.changed() => self.declare_again(&link),
                _ = self.leaving.cancelled(), if !drained => {
                    drained = true;
                    link.drain("leaving");
                }
                _ = self.hurry.cancelled() => break lost("the calls in flight took too long".into()),
                _ = link.over.cancelled() => break lost("this peer gives the stream up".into()),
                _ = sleep(link.tick()) => if let Some(text) = link.look() { break lost(text) },
            }
        };
        let (attached, drained) = {
            let state = link.state();
            (state.attached, state.drain_received)
        };
        drop(stream);
        if given_up {
            sleep(FAREWELL).await;
        }
        let connected = {
            let mut state = self.state();
            state.route = None;
            state.wire.take().is_some() && !given_up
        };
        link.end(end.is_ok() && drained);
        let end = end.err().unwrap_or(Error::Lost(Code::Ok, "the stream ended".into()));
        (end, attached.map(|attached| attached.elapsed()), connected)
    }

    fn declare(&self, link: &Link) {
        let version = *self.tools.version.borrow();
        let mut pages = self.tools.pages(ATTACH_BYTES);
        let tools = pages.remove(0);
        let attach = Attach {
            protocol_version: 1,
            source: self.source.clone(),
            instance: self.options.instance.clone(),
            tools,
            max_in_flight: self.options.max_in_flight,
            max_message_bytes: 0,
            qualified: self.options.qualified,
            subscribe: self.subscription.map(i32::from).into_iter().collect(),
            token: self.options.token.clone(),
            notices: self.options.notices.clone(),
            all_or_none: self.options.all_or_none,
            notifications_after: self.state().newest,
        };
        let mut state = link.state();
        (state.version, state.pages) = (version, pages);
        state.declared.push_back(version);
        drop(state);
        link.put(attach.encoded_len(), |message| message.attach = Some(attach));
    }

    /// Declares the tools by a later attach, if they have changed since the last one.
    fn declare_again(&self, link: &Link) {
        let state = link.state();
        if state.attached.is_some() && state.version != *self.tools.version.borrow() && !state.leaving() {
            drop(state);
            self.declare(link);
        }
    }

    /// Offers the tools that did not fit into the attach.
    async fn register(self: Arc<Self>, link: Arc<Link>, session_id: String, version: u64) {
        let Some(mut wire) = self.state().wire.clone() else { return };
        let pages = std::mem::take(&mut link.state().pages);
        let all_or_none = self.options.all_or_none;
        for tools in pages {
            let request = RegisterRequest { session_id: session_id.clone(), source: String::new(), tools, all_or_none };
            let mut request = wire.request(request);
            request.set_timeout(REGISTER);
            match wire.client.register(request).await {
                _ if link.state().version != version => return, // a later attach declares them again
                Ok(answer) => {
                    let RegisterResponse { refused, waiting, .. } = answer.into_inner();
                    self.note_tools(refused, waiting);
                }
                Err(status) => {
                    self.log(&format!("the bus refused tools that did not fit into one message: {}", status.message()));
                    if let problem @ Error::Refused(..) = end_of(&status)
                        && all_or_none
                    {
                        self.state().fatal = Some(problem);
                    }
                    return link.over.cancel();
                }
            }
        }
        self.answered(version);
        self.changed.send_replace(());
    }

    // -- messages of the bus -----------------------------------------------------------------------------------------------

    /// Handles the fields of a message, in the order of the protocol.
    fn receive(self: &Arc<Self>, message: InvokeResponse, link: &Arc<Link>) {
        link.hear();
        if let Some(attached) = message.attached {
            self.attached(attached, link);
        }
        for kind in message.events.into_iter().filter_map(|event| event.kind) {
            self.note(kind, link);
            self.changed.send_replace(());
        }
        self.tools.begin(message.calls, link, self);
        for (on_progress, item) in link.progressed(message.progress) {
            if catch_unwind(AssertUnwindSafe(|| on_progress(item))).is_err() {
                self.log("on_progress panicked");
            }
        }
        link.answered(message.results);
        for cancel in message.cancels {
            link.cancel(&cancel.call_id);
        }
        match message.heartbeat {
            Some(echo) if echo.from_peer => self.tools.begin(link.echoed(echo.sequence), link, self),
            Some(heartbeat) => link.put(heartbeat.encoded_len(), |message| message.heartbeat = Some(heartbeat)),
            None => (),
        }
        if let Some(drain) = message.drain {
            self.drained(&drain.reason, link);
        }
        link.when_idle();
    }

    /// Takes the answer to an attach; the first one opens the session.
    fn attached(self: &Arc<Self>, attached: Attached, link: &Arc<Link>) {
        let itself = attached.refused_total == 0 && !attached.refused.is_empty();
        if itself {
            // Everything stays as it was.
            self.log_once(Key::default(), format!("the bus refused the tools: {}", attached.refused[0].error));
        } else {
            self.state().refused.clear();
            self.state().waiting.clear();
            self.note_tools(attached.refused.clone(), attached.waiting.clone());
        }
        let (version, more, first, leaving) = {
            let mut state = link.state();
            let version = state.declared.pop_front().unwrap_or(state.version);
            let more = state.declared.is_empty() && !state.pages.is_empty() && !itself;
            (version, more, state.attached.is_none(), state.leaving())
        };
        if more {
            tokio::spawn(self.clone().register(link.clone(), attached.session_id.clone(), version));
        } else if itself {
            self.state().answered = Some(version);
        } else {
            self.answered(version);
        }
        if first {
            link.open(&attached);
            self.state().shown.clear();
            if attached.expires_seconds > 0.0 && attached.expires_seconds < EXPIRY_SECONDS {
                let hours = attached.expires_seconds / 3600.0;
                self.log(&format!("the key of {} expires in {hours:.1} hours: renew it", attached.identity));
            }
            if !leaving {
                let mut state = self.state();
                state.route = state.left.is_none().then(|| link.clone());
            }
        }
        self.declare_again(link);
        self.changed.send_replace(());
    }

    /// Takes an event. Events for the author are logged as warnings; unknown kinds are ignored.
    fn note(&self, kind: Kind, link: &Link) {
        match kind {
            Kind::Catalog(change) => self.follow(change),
            Kind::Notification(notification) => {
                let mut state = self.state();
                state.newest = state.newest.max(notification.number);
                state.notifications.push_back(notification);
                if state.notifications.len() > MAX_UNREAD
                    && let Some(oldest) = state.notifications.pop_front()
                {
                    state.notifications[0].lost += oldest.lost + 1;
                }
            }
            Kind::ToolOverwritten(ToolOverwritten { name, by_source, .. }) => {
                self.log(&format!("the tool '{name}' is not offered any more: the source '{by_source}' took its name"))
            }
            Kind::ToolRemoved(ToolRemoved { name, .. }) => {
                self.log(&format!("the tool '{name}' is not offered any more: another client withdrew it"))
            }
            Kind::PermissionDenied(PermissionDenied { permission, operation }) => {
                self.log(&format!("the bus refused '{operation}': the permission '{permission}' is missing"))
            }
            Kind::PermissionChanged(PermissionChanged { permission, granted, .. }) => {
                self.log(&format!("the permission '{permission}' was {}", if granted { "granted" } else { "revoked" }));
                if permission == "tools" && granted && !link.state().leaving() {
                    self.declare(link); // the bus withdrew the tools
                }
            }
            Kind::ToolsReviewed(ToolsReviewed { registered, refused, waiting, .. }) => {
                let mut state = self.state();
                let named = |name: &String| {
                    registered.contains(name)
                        || refused.iter().any(|tool| tool.name == *name)
                        || waiting.iter().any(|tool| tool.name == *name)
                };
                state.refused.retain(|(_, name), _| !named(name));
                state.waiting.retain(|(_, name), _| !named(name));
                drop(state);
                self.note_tools(refused, waiting);
                self.state().forget();
            }
        }
    }

    /// Has a reader get a change of the catalog; one that is far behind gets the whole catalog in place of all changes.
    fn follow(&self, change: CatalogChange) {
        let state = &mut *self.state();
        if change.full {
            state.catalog.clear();
        }
        for gone in &change.removed {
            state.catalog.remove(&(gone.source.clone(), gone.name.clone()));
        }
        for tool in change.added.iter().chain(&change.changed) {
            state.catalog.insert((tool.source.clone(), tool.name().to_owned()), tool.clone());
        }
        if state.changes.len() < MAX_UNREAD {
            return state.changes.push_back(change);
        }
        let added = state.catalog.values().cloned().collect();
        state.changes = [CatalogChange { full: true, added, revision: change.revision, ..Default::default() }].into();
    }

    /// Stores which tools the bus refused, and which wait for a role.
    fn note_tools(&self, refused: Vec<RefusedTool>, waiting: Vec<WaitingTool>) {
        for tool in refused {
            let key = (tool.role.clone().unwrap_or_default(), tool.name.clone());
            self.log_once(key.clone(), format!("the bus does not offer the tool '{}': {}", tool.name, tool.error));
            self.state().refused.insert(key, tool);
        }
        for tool in waiting {
            let (key, WaitingTool { name, role, .. }) = ((tool.role.clone(), tool.name.clone()), &tool);
            let text = format!("the tool '{name}' waits for role '{role}', which the bus does not have");
            self.log_once(key.clone(), text);
            self.state().waiting.insert(key, tool);
        }
    }

    /// Logs what holds for a tool now, once until that changes: not again after every reconnect.
    fn log_once(&self, key: Key, text: String) {
        if self.state().noted.insert(key, text.clone()).as_ref() != Some(&text) {
            self.log(&text);
        }
    }

    /// Notes that the bus has answered for all tools of a version.
    fn answered(&self, version: u64) {
        let mut state = self.state();
        state.answered = Some(version);
        state.forget();
    }

    fn drained(&self, reason: &str, link: &Link) {
        link.state().drain_received = true;
        self.state().route = None; // new calls wait for the next stream
        self.changed.send_replace(());
        if reason == "replaced" || reason == "requested" {
            let text = format!("the bus ended this peer's session: {reason}");
            self.log(&text);
            self.close_route(text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(log: Log) -> Arc<Peer> {
        let options = Options { log: Some(log), ..Default::default() };
        Peer::new("x", options, Addresses::parse("127.0.0.1:1").unwrap(), Tools::new(), None).unwrap()
    }

    #[tokio::test]
    async fn a_reader_that_is_far_behind_gets_the_newest_notifications_and_the_whole_catalog() {
        let (peer, link) = (peer(Arc::new(|_| ())), Link::new(0));
        let listed = |name: &str| ListedTool {
            tool: Some(Tool { name: name.into(), ..Default::default() }),
            source: "x".into(),
            ..Default::default()
        };
        let first = CatalogChange { full: true, added: vec![listed("stays")], ..Default::default() };
        peer.note(Kind::Catalog(first), &link);
        for number in 1..=MAX_UNREAD as u64 + 1 {
            peer.note(Kind::Notification(Notification { number, ..Default::default() }), &link);
            let mut change = CatalogChange { revision: number, ..Default::default() };
            match number % 2 {
                0 => change.removed.push(ToolRef { name: "comes_and_goes".into(), source: "x".into() }),
                _ => change.added.push(listed("comes_and_goes")),
            }
            peer.note(Kind::Catalog(change), &link);
        }
        let next = peer.next(|state| &mut state.notifications).await.unwrap();
        assert_eq!((next.number, next.lost, peer.state().notifications.len()), (2, 1, MAX_UNREAD - 1));
        let whole = peer.next(|state| &mut state.changes).await.unwrap();
        assert_eq!((whole.full, whole.revision, whole.added), (true, MAX_UNREAD as u64, vec![listed("stays")]));
        let change = peer.next(|state| &mut state.changes).await.unwrap();
        assert_eq!((change.full, change.added, peer.state().changes.len()), (false, vec![listed("comes_and_goes")], 0));
    }

    #[tokio::test]
    async fn a_refusal_is_logged_once_until_it_changes() {
        let lines: Arc<Mutex<Vec<String>>> = Arc::default();
        let log = lines.clone();
        let peer = peer(Arc::new(move |line| log.lock().unwrap().push(line.into())));
        let refused = |error: &str| RefusedTool { name: "bad".into(), error: error.into(), ..Default::default() };
        let answer =
            |refused: Vec<RefusedTool>, refused_total| Attached { refused, refused_total, ..Default::default() };
        let waiting = WaitingTool { name: "worker".into(), role: "workers".into() };
        let waits = Attached { waiting: vec![waiting], ..Default::default() };
        let none = answer(Vec::new(), 0);
        let (first, other) = (answer(vec![refused("first")], 1), answer(vec![refused("other")], 1));
        let all = answer(vec![refused("no tools")], 0);
        for attached in [&first, &first, &other, &none, &other, &all, &all, &waits, &waits, &none, &waits] {
            peer.attached(attached.clone(), &Link::new(0));
        }
        // Those that did not fit into the attach come after its answer.
        let page = Link::new(0);
        for _ in 0..2 {
            page.state().pages = vec![Vec::new()];
            peer.attached(none.clone(), &page);
            peer.note_tools(vec![refused("page")], Vec::new());
            peer.answered(0);
        }
        let lines = lines.lock().unwrap();
        let ends = ["first", "other", "other", "no tools", "have", "have", "page"];
        assert!(
            lines.len() == ends.len() && lines.iter().zip(ends).all(|(line, end)| line.ends_with(end)),
            "{lines:?}"
        );
    }
}
