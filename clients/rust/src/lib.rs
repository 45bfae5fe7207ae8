//! Offers tools to a [toolbus](https://pypi.org/project/toolbus/), and calls them: plugins and hosts on tonic and tokio.
//!
//! [`Plugin`] offers tools, and [`ToolScope`] is a call as its handler sees it. [`Host`] lists and calls tools; a [`Call`]
//! is one that is about to be made. The messages of the protocol, such as [`Tool`] and [`ToolResult`], are what both take
//! and return: their fields have the names and meanings of the Python library.
#![warn(missing_docs)]
#![allow(clippy::large_enum_variant)] // of messages on their way

mod addresses;
mod calls;
mod host;
mod lent;
mod link;
/// The messages of the protocol, made from its `.proto` files.
#[rustfmt::skip]
#[allow(missing_docs, clippy::all, rustdoc::all)]
pub mod pb;
mod peer;
mod plugin;
mod tools;
mod values;
mod wire;

pub use calls::{AskedQuestion, Call};
pub use host::{Host, Watch};
pub use lent::{Generation, GenerationRequest, LendOptions, Message};
pub use pb::{
    CallContext, CallError, CallStage, CatalogChange, ContentBlock, ErrorCode, ListRequest, ListResponse, ListedTool,
    Notification, RefusedTool, Tool, ToolAnnotations, ToolCall, ToolProgress, ToolResult, WaitingTool,
};
pub use peer::{Log, Options};
pub use plugin::Plugin;
pub use tools::{Answer, IntoReply, Reply, ToolScope, schema_of};
pub use values::{BoxError, Error, Result};
