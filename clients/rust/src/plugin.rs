//! Offers tools: a program makes a [`Plugin`], adds its tools, and runs it.
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::{join_all, select_all};
use schemars::JsonSchema;
use serde::{Serialize, de::DeserializeOwned};

use crate::calls::Call;
use crate::pb::{RefusedTool, Tool, WaitingTool};
use crate::peer::{Options, Peer, complete};
use crate::tools::{IntoReply, ToolScope, Tools};
use crate::values::{BoxError, Error, Result, arguments_json};

const GRACE: Duration = Duration::from_secs(30); // for calls in flight, when a plugin leaves

/// Offers tools under a source, at every bus of its address. It reconnects until it is closed.
pub struct Plugin {
    peers: Vec<Arc<Peer>>,
    tools: Arc<Tools>,
    fault: Mutex<Option<Error>>, // the first mistake of the program, which `run`, `ready` and `start` return
}

impl Plugin {
    /// Makes a plugin that finds its bus by the environment.
    pub fn new(source: &str) -> Self {
        Self::with(source, Options::default())
    }

    /// Makes a plugin. A mistake in its source or options is what `run`, `ready` or `start` returns.
    pub fn with(source: &str, options: Options) -> Self {
        let tools = Tools::new();
        let made = complete(options).and_then(|(options, addresses)| {
            let peer = |address| Peer::new(source, options.clone(), vec![address], tools.clone(), None);
            addresses.into_iter().map(peer).collect::<Result<Vec<_>>>()
        });
        let (peers, fault) = match made {
            Ok(peers) => (peers, None),
            Err(fault) => (Vec::new(), Some(fault)),
        };
        Plugin { peers, tools, fault: Mutex::new(fault) }
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
        self.peers.iter().flat_map(|peer| peer.refused()).collect()
    }

    /// Returns the tools that wait for a role.
    pub fn waiting(&self) -> Vec<WaitingTool> {
        self.peers.iter().flat_map(|peer| peer.waiting()).collect()
    }

    /// Connects in the background.
    pub fn start(&self) -> Result<()> {
        if let Some(fault) = self.fault.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone() {
            return Err(fault);
        }
        self.peers.iter().for_each(Peer::begin);
        Ok(())
    }

    /// Connects, and waits until a bus has answered for all tools.
    pub async fn ready(&self) -> Result<()> {
        self.start()?;
        select_all(self.peers.iter().map(|peer| Box::pin(peer.declared()))).await.0
    }

    /// Connects and serves until SIGINT or SIGTERM, or until the bus sends this plugin away; then finishes its calls.
    /// Returns the error of a bus that refuses it.
    pub async fn run(&self) -> Result<()> {
        let stopped = stopped(); // a signal may come as soon as a bus lists the tools
        self.start()?;
        let served = join_all(self.peers.iter().map(|peer| peer.ended(Duration::MAX)));
        let ended = tokio::select! {
            ended = served => ended,
            _ = stopped => self.leave().await,
        };
        ended.into_iter().collect()
    }

    /// Leaves gracefully: withdraws the tools, finishes the calls in flight for at most 30 s, disconnects.
    pub async fn close(&self) {
        self.leave().await;
    }

    async fn leave(&self) -> Vec<Result<()>> {
        self.peers.iter().for_each(Peer::leave);
        join_all(self.peers.iter().map(|peer| peer.ended(GRACE))).await
    }

    /// Calls any tool of the bus, the first one of the address, outside of a call; in a handler use `scope.call`.
    pub fn call(&self, name: impl Into<String>, arguments: impl Serialize) -> Result<Call> {
        self.start()?;
        Ok(Call::new(self.peers[0].clone(), name.into(), arguments_json(&arguments)))
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        self.peers.iter().for_each(Peer::leave);
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
