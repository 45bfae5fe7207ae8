//! Lists tools and calls them, usually for a language model.
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde::Serialize;
use tokio::time::{Instant, timeout_at};
use tonic::Code;

use crate::addresses::Addresses;
use crate::calls::Call;
use crate::lent::{Generation, GenerationRequest, LendOptions, lend};
use crate::pb::*;
use crate::peer::{Options, Peer, State, complete};
use crate::plugin::Plugin;
use crate::tools::{ToolScope, Tools};
use crate::values::{BoxError, Error, Result, arguments_json};

const LIST: Duration = Duration::from_secs(10); // for a listing, waiting for a connection included
const CLOSE: Duration = Duration::from_secs(5);

/// Calls tools. It connects when it is first used, and reconnects until it is closed or dropped.
pub struct Host {
    source: String,
    options: Options,
    addresses: Addresses,
    peer: Arc<Peer>,
    lender: OnceLock<Plugin>, // offers the model of this host
}

impl Host {
    /// Makes a host that finds its bus by the environment.
    pub fn new() -> Result<Self> {
        Self::with("host", Options::default())
    }

    /// Makes a host; its source names it in records of calls.
    pub fn with(source: &str, options: Options) -> Result<Self> {
        let (options, addresses) = complete(options)?;
        let peer = Peer::new(source, options.clone(), addresses.clone(), Tools::new(), None)?;
        Ok(Host { source: source.into(), options, addresses, peer, lender: OnceLock::new() })
    }

    /// Waits until a bus has accepted this host.
    pub async fn ready(&self) -> Result<()> {
        self.peer.begin();
        self.peer.connected().await
    }

    /// Calls a tool: `.await` gives its [`ToolResult`], also that of a failure. Arguments are anything that serde writes
    /// as an object, or the JSON text that a model wrote, which is passed on unchanged.
    ///
    /// Without a connection it waits for one, and it is sent again where that is safe, both within its timeout.
    pub fn call(&self, name: impl Into<String>, arguments: impl Serialize) -> Call {
        self.peer.begin();
        Call::new(self.peer.clone(), name.into(), arguments_json(&arguments))
    }

    /// Lists the tools that this host can call; `ListRequest::default()` asks for all. The pages are joined.
    pub async fn list(&self, request: ListRequest) -> Result<ListResponse> {
        self.peer.begin();
        let end = Instant::now() + LIST;
        let silent = |_| {
            Error::Lost(Code::DeadlineExceeded, format!("no bus answered at {} within {LIST:?}", self.options.address))
        };
        let mut listing: Option<ListResponse> = None;
        loop {
            let Some(mut wire) = self.peer.wire() else {
                timeout_at(end, self.peer.connected()).await.map_err(silent)??;
                tokio::task::yield_now().await;
                continue;
            };
            let page_token =
                listing.as_mut().map_or_else(String::new, |listing| std::mem::take(&mut listing.next_page_token));
            let mut asked = wire.request(ListRequest { page_token, ..request.clone() });
            asked.set_timeout(end - Instant::now());
            let page = timeout_at(end, wire.client.list(asked)).await.map_err(silent)??.into_inner();
            let listing = match &mut listing {
                Some(listing) => {
                    listing.tools.extend(page.tools);
                    listing.next_page_token = page.next_page_token;
                    listing
                }
                None => listing.insert(page),
            };
            if listing.next_page_token.is_empty() {
                return Ok(std::mem::take(listing));
            }
        }
    }

    /// Gives the whole catalog (`full`), then its changes; after a reconnect the whole catalog again.
    pub fn watch(&self) -> Result<Watch<CatalogChange>> {
        self.follow(Subscription::Catalog, |state| &mut state.changes)
    }

    /// Gives the notifications of plugins to users; after a reconnect also those that it missed.
    pub fn notifications(&self) -> Result<Watch<Notification>> {
        self.follow(Subscription::Notifications, |state| &mut state.notifications)
    }

    fn follow<T>(&self, subscription: Subscription, unread: Unread<T>) -> Result<Watch<T>> {
        let (options, _) = complete(Options { instance: String::new(), ..self.options.clone() })?;
        let peer = Peer::new(&self.source, options, self.addresses.clone(), Tools::new(), Some(subscription))?;
        peer.begin();
        Ok(Watch { peer, unread })
    }

    /// Lends the model of this host to plugins that have the permission `generation`, until the host is closed.
    ///
    /// `generate` returns a text or a [`Generation`]; its error is that of the request. Several hosts may lend: requests
    /// are shared between them. Without a bus the model is lent once there is one.
    pub fn lend<F, Fut, G>(&self, limits: LendOptions, generate: F) -> Result<()>
    where
        F: Fn(GenerationRequest, ToolScope) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<G, BoxError>> + Send + 'static,
        G: Into<Generation>,
    {
        let twice = || Error::Setup("this host lends its model already: make a host for each model".into());
        if self.lender.get().is_some() {
            return Err(twice());
        }
        self.lender.set(lend(&self.options, limits, generate)?).map_err(|_| twice())
    }

    /// Disconnects; calls in flight end in CANCELLED.
    pub async fn close(&self) {
        if let Some(lender) = self.lender.get() {
            lender.leave(Duration::ZERO).await;
        }
        self.peer.closed.cancel();
        self.peer.leave();
        let _ = self.peer.ended(CLOSE).await;
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.peer.leave();
    }
}

type Unread<T> = fn(&mut State) -> &mut VecDeque<T>;

/// What the bus sends to a subscription, on a stream of its own, which ends when it is dropped.
///
/// Of 1,000 items that were not read, the oldest notifications are left out and counted in `lost` of the next one, and
/// changes become one with the whole catalog (`full`).
pub struct Watch<T> {
    peer: Arc<Peer>,
    unread: Unread<T>,
}

impl<T> Watch<T> {
    /// Waits for the next item; the error is that of a bus that refuses this host.
    pub async fn next(&mut self) -> Result<T> {
        self.peer.next(self.unread).await
    }
}

impl<T> Drop for Watch<T> {
    fn drop(&mut self) {
        self.peer.leave();
    }
}
