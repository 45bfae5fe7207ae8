//! Gives the messages of the protocol what programs need: errors, results, content, listed tools.
use std::fmt;

use serde::de::DeserializeOwned;

use crate::pb::{content_block::Kind, embedded_resource::Body, *};

/// The result of whatever can fail other than a call.
pub type Result<T, E = Error> = std::result::Result<T, E>;
/// Any error: what a handler may fail with. A text becomes one by `.into()`.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why a plugin or a host cannot go on. A failed call is none of these, but a [`ToolResult`] with an error.
#[derive(Clone)]
pub enum Error {
    /// A mistake of the program: the text names the value, the rule and the fix.
    Setup(String),
    /// The bus refuses this peer or this request, and another attempt would not change that; the text is the bus's.
    Refused(tonic::Code, String),
    /// No bus answered, or the connection broke.
    Lost(tonic::Code, String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Error::Setup(text) => f.write_str(text),
            Error::Refused(code, text) | Error::Lost(code, text) => write!(f, "{code:?}: {text}"),
        }
    }
}

/// The same text, because that is what a `main` shows that returns an error.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}

impl From<tonic::Status> for Error {
    fn from(status: tonic::Status) -> Self {
        use tonic::Code::{Cancelled, DeadlineExceeded, Unavailable};
        let (code, text) = (status.code(), status.message().to_owned());
        let lost = matches!(code, Unavailable | DeadlineExceeded | Cancelled);
        if lost { Error::Lost(code, text) } else { Error::Refused(code, text) }
    }
}

impl CallError {
    /// Returns what a handler fails with to name the failure for programs (`reason`) and for models (`message`).
    pub fn tool(reason: impl Into<String>, message: impl Into<String>) -> Self {
        CallError { reason: reason.into(), ..Self::new(ErrorCode::Tool, CallStage::Accepted, message) }
    }

    pub(crate) fn new(code: ErrorCode, stage: CallStage, message: impl Into<String>) -> Self {
        CallError { code: code.into(), stage: stage.into(), message: message.into(), ..Default::default() }
    }

    pub(crate) fn limit(self, name: &str, value: f64) -> Self {
        CallError { limit: Some(Limit { name: name.into(), value }), ..self }
    }

    /// Returns the code without its prefix, such as `TOOL`; of a code that this version does not know, the number.
    pub fn code_name(&self) -> String {
        let name = |code: ErrorCode| code.as_str_name().trim_start_matches("ERROR_CODE_").to_owned();
        ErrorCode::try_from(self.code).map_or(self.code.to_string(), name)
    }

    /// Returns the stage without its prefix, such as `NOT_DISPATCHED`.
    pub fn stage_name(&self) -> String {
        let name = |stage: CallStage| stage.as_str_name().trim_start_matches("CALL_STAGE_").to_owned();
        CallStage::try_from(self.stage).map_or(self.stage.to_string(), name)
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        if self.message.is_empty() { f.write_str(&self.code_name()) } else { f.write_str(&self.message) }
    }
}

impl std::error::Error for CallError {}

impl From<CallError> for ToolResult {
    fn from(error: CallError) -> Self {
        ToolResult { is_error: true, error: Some(error), ..Default::default() }
    }
}

impl ToolResult {
    /// Whether the tool has questions before it can go on: then the result is neither a success nor a failure.
    pub fn asks(&self) -> bool {
        !self.is_error && self.error.is_none() && !self.input_requests_json.is_empty()
    }

    /// Returns the output as a type of the program, `serde_json::Value` or, with every digit of large numbers,
    /// `Box<RawValue>`; the error of a call that failed, that asks first, or whose output is of another type.
    pub fn output<T: DeserializeOwned>(&self) -> Result<T, CallError> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        if self.is_error || self.asks() {
            let reason = if self.asks() { "needs_input" } else { "" };
            return Err(CallError::tool(reason, self.text()));
        }
        let json = if self.output_json.is_empty() { "null" } else { &self.output_json };
        serde_json::from_str(json)
            .map_err(|problem| CallError::tool("output", format!("the output {json:.80}: {problem}")))
    }

    /// Returns the text for a model: the error, then the output (a text without quotes), then the content.
    pub fn text(&self) -> String {
        if self.asks() {
            return format!("the tool asks first: {}", self.input_requests_json);
        }
        let mut parts: Vec<String> = self.error.iter().map(CallError::to_string).collect();
        if parts.is_empty() && self.is_error {
            parts.push("the tool failed".into());
        }
        let output = serde_json::from_str(&self.output_json).unwrap_or_else(|_| self.output_json.clone());
        let shown = self.content.iter().map(ContentBlock::to_string);
        for part in std::iter::once(output).chain(shown) {
            if !part.is_empty() && part != "null" && !parts.contains(&part) {
                parts.push(part);
            }
        }
        if parts.is_empty() { "null".into() } else { parts.join("\n") }
    }
}

impl From<Kind> for ContentBlock {
    fn from(kind: Kind) -> Self {
        ContentBlock { kind: Some(kind), annotations_json: String::new() }
    }
}

impl ContentBlock {
    /// Returns a part that holds plain text.
    pub fn text(text: impl Into<String>) -> Self {
        Kind::Text(TextContent { text: text.into() }).into()
    }

    /// Returns a part that holds a picture, from its encoded bytes (not base64) and their type, such as `image/png`.
    pub fn image(data: impl Into<Vec<u8>>, mime_type: impl Into<String>) -> Self {
        Kind::Image(ImageContent { data: data.into(), mime_type: mime_type.into() }).into()
    }

    /// Returns a part that holds a sound, from its encoded bytes and their type, such as `audio/wav`.
    pub fn audio(data: impl Into<Vec<u8>>, mime_type: impl Into<String>) -> Self {
        Kind::Audio(AudioContent { data: data.into(), mime_type: mime_type.into() }).into()
    }

    /// Returns a part that holds a file: its address, its bytes and their type.
    pub fn file(uri: impl Into<String>, data: impl Into<Vec<u8>>, mime_type: impl Into<String>) -> Self {
        let body = Some(Body::Data(data.into()));
        Kind::Resource(EmbeddedResource { uri: uri.into(), mime_type: mime_type.into(), body }).into()
    }

    /// Returns a part that is a link to something that can be read elsewhere.
    pub fn link(uri: impl Into<String>, name: impl Into<String>) -> Self {
        Kind::ResourceLink(ResourceLink { uri: uri.into(), name: name.into(), ..Default::default() }).into()
    }
}

/// What a model sees of a part: its text, or what it is.
impl fmt::Display for ContentBlock {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.kind.as_ref() {
            Some(Kind::Text(part)) => f.write_str(&part.text),
            Some(Kind::Image(part)) => write!(f, "[image: {}, {} bytes]", part.mime_type, part.data.len()),
            Some(Kind::Audio(part)) => write!(f, "[audio: {}, {} bytes]", part.mime_type, part.data.len()),
            Some(Kind::ResourceLink(part)) => write!(f, "[{}: {}]", part.name, part.uri),
            Some(Kind::Resource(part)) => match part.body.as_ref() {
                Some(Body::Text(text)) => f.write_str(text),
                Some(Body::Data(data)) => write!(f, "[resource: {}, {} bytes]", part.uri, data.len()),
                None => write!(f, "[resource: {}]", part.uri),
            },
            None => Ok(()),
        }
    }
}

impl ListedTool {
    /// Returns the name by which the tool is called.
    pub fn name(&self) -> &str {
        self.tool.as_ref().map_or("", |tool| &tool.name)
    }

    /// Returns what the tool does, for a model.
    pub fn description(&self) -> &str {
        self.tool.as_ref().map_or("", |tool| &tool.description)
    }

    /// Returns the JSON Schema of the arguments, as text.
    pub fn parameters_json(&self) -> &str {
        self.tool.as_ref().map_or("{}", |tool| &tool.parameters_json)
    }
}

/// Returns arguments as JSON text: `()` as `{}`, a text unchanged, since a model wrote it.
pub(crate) fn arguments_json(arguments: &impl serde::Serialize) -> Result<String, CallError> {
    let fault = |problem| {
        let text = format!("JSON cannot hold the arguments: {problem}");
        CallError::new(ErrorCode::InvalidArguments, CallStage::NotDispatched, text)
    };
    let json = serde_json::to_string(arguments).map_err(fault)?;
    match json.as_bytes() {
        [b'"', ..] => serde_json::from_str(&json).map_err(fault),
        b"null" => Ok("{}".into()),
        _ => Ok(json),
    }
}

/// Returns a random number.
pub(crate) fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}
