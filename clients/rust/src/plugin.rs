//! Offers tools: a program makes a [`Plugin`], adds its tools, and runs it.
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::future::{join_all, select_ok};
use schemars::JsonSchema;
use serde::{Serialize, de::DeserializeOwned};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::addresses::Addresses;
use crate::calls::Call;
use crate::pb::{RefusedTool, Tool, WaitingTool};
use crate::peer::{Options, Peer, check_source, complete};
use crate::tools::{IntoReply, ToolScope, Tools};
use crate::values::{BoxError, Error, Result, arguments_json};

const GRACE: Duration = Duration::from_secs(30); // for calls in flight, when a plugin leaves

/// Offers tools under a source, at every bus of its address. It reconnects until it is closed.
pub struct Plugin {
    buses: Arc<Buses>,
    tools: Arc<Tools>,
    addresses: Option<Addresses>, // None where the options have a mistake
    fault: Mutex<Option<Error>>,  // the first mistake of the program, which `run`, `ready` and `start` return
    started: AtomicBool,
}

/// The buses of a plugin, with a peer at each.
struct Buses {
    source: String,
    options: Options,
    peers: watch::Sender<Vec<(String, Arc<Peer>)>>, // by address
    left: CancellationToken,
}

impl Buses {
    /// Makes the peers at these addresses; those at others leave, unless they are connected. Returns the new ones.
    fn set(&self, addresses: &[String], tools: &Arc<Tools>) -> Result<Vec<Arc<Peer>>> {
        let (mut added, mut gone) = (Vec::new(), Vec::new());
        let mut peers = self.peers.borrow().clone();
        peers.retain(|(address, peer)| {
            let stays = addresses.contains(address) || peer.wire().is_some();
            if !stays {
                gone.push(peer.clone());
            }
            stays
        });
        for address in addresses {
            if !peers.iter().any(|(known, _)| known == address) {
                let only = Addresses::parse(address)?;
                let peer = Peer::new(&self.source, self.options.clone(), only, tools.clone(), None)?;
                peers.push((address.clone(), peer.clone()));
                added.push(peer);
            }
        }
        if !added.is_empty() || !gone.is_empty() {
            self.peers.send_replace(peers);
        }
        gone.iter().for_each(Peer::leave);
        Ok(added)
    }

    fn leave(&self) {
        self.left.cancel();
        self.all().iter().for_each(Peer::leave);
    }

    fn all(&self) -> Vec<Arc<Peer>> {
        self.peers.borrow().iter().map(|(_, peer)| peer.clone()).collect()
    }
}

/// Attaches to the buses that DNS has for names, as long as the plugin lives.
async fn follow(buses: Weak<Buses>, mut addresses: Addresses, tools: Arc<Tools>) {
    let mut shown = String::new(); // the newest failure, as it was logged
    loop {
        let found = addresses.look_up().await;
        let Some(buses) = buses.upgrade() else { return };
        match found.and_then(|()| buses.set(&addresses.known, &tools)) {
            Ok(_) if buses.left.is_cancelled() => return buses.leave(),
            Ok(added) => added.iter().for_each(Peer::begin),
            Err(problem) if problem.to_string() != shown => {
                shown = problem.to_string();
                buses.options.warn(&shown);
            }
            Err(_) => (),
        }
        drop(buses);
        Addresses::due().await;
    }
}

impl Plugin {
    /// Makes a plugin that finds its bus by the environment.
    pub fn new(source: &str) -> Self {
        Self::with(source, Options::default())
    }

    /// Makes a plugin. A mistake in its source or options is what `run`, `ready` or `start` returns.
    pub fn with(source: &str, options: Options) -> Self {
        let (tools, source) = (Tools::new(), source.to_owned());
        let (options, addresses, mut fault) = match complete(options.clone()) {
            Ok((options, addresses)) => (options, Some(addresses), check_source(&source).err()),
            Err(fault) => (options, None, Some(fault)),
        };
        let buses =
            Arc::new(Buses { source, options, peers: watch::Sender::default(), left: CancellationToken::new() });
        if let (Some(addresses), None) = (&addresses, &fault) {
            fault = buses.set(&addresses.known, &tools).err();
        }
        Plugin { buses, tools, addresses, fault: Mutex::new(fault), started: AtomicBool::new(false) }
    }

    /// Offers a tool that needs a name and a description only; else as `add`, whose error `run` returns.
    pub fn tool<A, F, Fut, R>(&self, name: &str, description: &str, handler: F) -> &Self
    where
        A: DeserializeOwned + JsonSchema,
        F: Fn(A, ToolScope) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<R, BoxError>> + Send + 'static,
        R: IntoReply,
    {
        let tool = Tool { name: name.into(), description: description.into(), ..Default::default() };
        if let Err(fault) = self.add(tool, handler) {
            self.fault.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).get_or_insert(fault);
        }
        self
    }

    /// Offers a tool, also while connected. Its schema is that of the type that the handler takes, unless it has
    /// `parameters_json`. An error of the handler fails the call with its text, and so does a panic.
    pub fn add<A, F, Fut, R>(&self, tool: Tool, handler: F) -> Result<()>
    where
        A: DeserializeOwned + JsonSchema,
        F: Fn(A, ToolScope) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<R, BoxError>> + Send + 'static,
        R: IntoReply,
    {
        self.tools.add(tool, handler)
    }

    /// Withdraws a tool; its calls in flight are finished. Returns whether it existed.
    pub fn remove_tool(&self, name: &str) -> bool {
        self.tools.remove(name)
    }

    /// Returns the tools that a bus refused, each with its reason.
    pub fn refused(&self) -> Vec<RefusedTool> {
        self.buses.all().iter().flat_map(|peer| peer.refused()).collect()
    }

    /// Returns the tools that wait for a role.
    pub fn waiting(&self) -> Vec<WaitingTool> {
        self.buses.all().iter().flat_map(|peer| peer.waiting()).collect()
    }

    /// Connects in the background.
    pub fn start(&self) -> Result<()> {
        if let Some(fault) = self.fault.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone() {
            return Err(fault);
        }
        self.buses.all().iter().for_each(Peer::begin);
        if let Some(addresses) = self.addresses.clone().filter(Addresses::has_names)
            && !self.started.swap(true, Ordering::AcqRel)
        {
            tokio::spawn(follow(Arc::downgrade(&self.buses), addresses, self.tools.clone()));
        }
        Ok(())
    }

    /// Connects, and waits until a bus has answered for all tools; the error is that of a bus if each refuses this plugin.
    pub async fn ready(&self) -> Result<()> {
        self.start()?;
        let any = |peers: Vec<Arc<Peer>>| async {
            let left = || Error::Lost(Code::Unavailable, "this plugin has left the bus".into());
            let answers = peers.into_iter().map(|peer| Box::pin(async move { peer.declared().await }));
            if answers.len() == 0 { Err(left()) } else { select_ok(answers).await.map(|_| ()) }
        };
        self.with_peers(any).await
    }

    /// Connects and serves until SIGINT or SIGTERM, or until the bus sends this plugin away; then finishes its calls.
    /// Returns the error of a bus that refuses it.
    pub async fn run(&self) -> Result<()> {
        let stopped = stopped(); // a signal may come as soon as a bus lists the tools
        self.start()?;
        let served = self
            .with_peers(|peers| join_all(peers.into_iter().map(|peer| async move { peer.ended(Duration::MAX).await })));
        let ended = tokio::select! {
            ended = served => ended,
            _ = stopped => self.leave(GRACE).await,
        };
        ended.into_iter().collect()
    }

    /// Waits for something of all peers, anew when DNS has others; of none where this plugin leaves before DNS has answered.
    async fn with_peers<F: Future>(&self, wait: impl Fn(Vec<Arc<Peer>>) -> F) -> F::Output {
        let mut changed = self.buses.peers.subscribe();
        loop {
            tokio::select! {
                _ = changed.wait_for(|peers| !peers.is_empty()) => (),
                _ = self.buses.left.cancelled() => (),
            }
            tokio::select! {
                biased;
                Ok(()) = changed.changed() => (),
                output = wait(self.buses.all()) => return output,
            }
        }
    }

    /// Leaves gracefully: withdraws the tools, finishes the calls in flight for at most 30 s, disconnects.
    pub async fn close(&self) {
        self.leave(GRACE).await;
    }

    pub(crate) async fn leave(&self, grace: Duration) -> Vec<Result<()>> {
        self.buses.leave();
        let peers = self.buses.all();
        join_all(peers.iter().map(|peer| peer.ended(grace))).await
    }

    /// Calls any tool of the bus, the first one of the address that is connected, outside of a call; in a handler use
    /// `scope.call`.
    pub fn call(&self, name: impl Into<String>, arguments: impl Serialize) -> Result<Call> {
        self.start()?;
        let peers = self.buses.all();
        let connected = peers.iter().find(|peer| peer.wire().is_some());
        match connected.or(peers.first()) {
            Some(peer) => Ok(Call::new(peer.clone(), name.into(), arguments_json(&arguments))),
            None => Err(Error::Lost(Code::Unavailable, "DNS has not answered yet: wait for ready()".into())),
        }
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        self.buses.leave();
    }
}

/// Takes SIGINT and SIGTERM from now on; the future ends with the first of them.
fn stopped() -> impl Future<Output = ()> {
    #[cfg(unix)]
    let terminated = {
        use tokio::signal::unix::{SignalKind, signal};
        [SignalKind::terminate(), SignalKind::interrupt()].map(signal)
    };
    async move {
        #[cfg(unix)]
        if let [Ok(mut terminated), Ok(mut interrupted)] = terminated {
            tokio::select! { _ = terminated.recv() => (), _ = interrupted.recv() => () }
            return;
        }
        let _ = tokio::signal::ctrl_c().await;
    }
}
