//! Lends a host's model to plugins, as the tool `host:generate`, and asks it.
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::pb::{CallError, CallStage, ErrorCode, Tool};
use crate::peer::Options;
use crate::plugin::Plugin;
use crate::tools::ToolScope;
use crate::values::{BoxError, Error, Result};

const TOOL: &str = "host:generate";
const MAX_TOKENS: u32 = 1024;
const TIMEOUT: Duration = Duration::from_secs(120);
const MAX_IN_FLIGHT: u32 = 4;

/// A message of a conversation with a model.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// Its text.
    pub content: String,
}

impl Message {
    /// Returns a message of the user.
    pub fn user(text: impl Into<String>) -> Self {
        Message { role: "user".into(), content: text.into() }
    }
}

/// What a plugin asks of the model that a host lends; what is left out is the host's own.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct GenerationRequest {
    /// Oldest first, at most 256.
    pub messages: Vec<Message>,
    /// `quiet`, the default: with the host's own instructions and settings; `raw`: these messages alone.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub mode: String,
    /// Of the answer; never more than the host lends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,
    /// As providers define it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f64>,
    /// Texts at which the answer ends.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
    /// Which model the plugin would prefer; the host need not follow.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub model: String,
}

impl From<&str> for GenerationRequest {
    fn from(text: &str) -> Self {
        GenerationRequest { messages: vec![Message::user(text)], ..Default::default() }
    }
}

/// The answer of a lent model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Generation {
    /// The answer.
    pub text: String,
    /// The provider's name of the model; empty if the host does not state it.
    pub model: String,
    /// Why the answer ended, in the provider's words; empty if the host does not state it.
    pub stop_reason: String,
    /// Tokens, by the provider's names.
    pub usage: HashMap<String, u64>,
}

impl From<String> for Generation {
    fn from(text: String) -> Self {
        Generation { text, ..Default::default() }
    }
}

/// What plugins get of a lent model at most; what is left out has its default.
#[derive(Clone, Copy, Debug, Default)]
pub struct LendOptions {
    /// Of one answer; 1024 by default.
    pub max_tokens: Option<u32>,
    /// Of one request; 120 s by default, at most 300 s.
    pub timeout: Option<Duration>,
    /// Requests at once; 4 by default.
    pub max_in_flight: Option<u32>,
}

/// Offers the model of a host, in a session of its own, until the plugin is dropped.
pub(crate) fn lend<F, Fut, G>(options: &Options, limits: LendOptions, generate: F) -> Result<Plugin>
where
    F: Fn(GenerationRequest, ToolScope) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<G, BoxError>> + Send + 'static,
    G: Into<Generation>,
{
    let max_tokens = limits.max_tokens.unwrap_or(MAX_TOKENS);
    if !(1..=1_000_000).contains(&max_tokens) {
        return Err(Error::Setup(format!("max_tokens is {max_tokens}: lend from 1 to 1,000,000 tokens an answer")));
    }
    let lender = Plugin::with(
        "host",
        Options {
            max_in_flight: limits.max_in_flight.unwrap_or(MAX_IN_FLIGHT),
            qualified: true,
            instance: String::new(),
            notices: Vec::new(),
            all_or_none: false,
            ..options.clone()
        },
    );
    let tool = Tool {
        name: "generate".into(),
        description: "Asks the language model of this host.".into(),
        parameters_json: parameters(max_tokens).to_string(),
        timeout_seconds: limits.timeout.unwrap_or(TIMEOUT).as_secs_f64(),
        ..Default::default()
    };
    let generate = Arc::new(generate);
    lender.add(tool, move |mut request: GenerationRequest, scope| {
        let generate = generate.clone();
        if request.mode.is_empty() {
            request.mode = "quiet".into();
        }
        request.max_tokens.get_or_insert(max_tokens);
        async move { generate(request, scope).await.map(G::into) }
    })?;
    lender.start()?;
    Ok(lender)
}

fn parameters(max_tokens: u32) -> Value {
    let message = json!({
        "type": "object",
        "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": {"type": "string"}},
        "required": ["role", "content"],
    });
    json!({
        "type": "object",
        "properties": {
            "messages": {"type": "array", "items": message, "minItems": 1, "maxItems": 256},
            "mode": {"enum": ["quiet", "raw"]},
            "max_tokens": {"type": "integer", "minimum": 1, "maximum": max_tokens},
            "temperature": {"type": "number", "minimum": 0, "maximum": 2},
            "stop": {"type": "array", "items": {"type": "string"}, "maxItems": 16},
            "model": {"type": "string"},
        },
        "required": ["messages"],
        "additionalProperties": false,
    })
}

impl ToolScope {
    /// Asks the model that a host lends, as part of this call: it ends with it, and counts for its user. The source of the
    /// plugin needs the permission `generation`. A request may be a text.
    pub async fn generate(&self, request: impl Into<GenerationRequest>) -> Result<Generation, CallError> {
        self.call(TOOL, request.into()).await.output()
    }
}

impl Plugin {
    /// Asks the model that a host lends, outside of a call; in a handler use `scope.generate`. The source needs the
    /// permission `generation`. A request may be a text.
    pub async fn generate(&self, request: impl Into<GenerationRequest>) -> Result<Generation, CallError> {
        match self.call(TOOL, request.into()) {
            Ok(call) => call.await.output(),
            Err(fault) => Err(CallError::new(ErrorCode::Unavailable, CallStage::NotDispatched, fault.to_string())),
        }
    }
}
