//! Connects to a bus with tonic, by the credential as it is now. Addresses are `HOST:PORT` and `unix:PATH` without TLS,
//! `tls:HOST:PORT` and `mtls:HOST:PORT` with it; `tls:NAME@HOST:PORT` where the certificate has another name.
use std::collections::HashMap;
use std::error::Error as _;
use std::time::Duration;

use tonic::metadata::AsciiMetadataValue;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Status};

use crate::pb::tool_bus_service_client::ToolBusServiceClient;
use crate::values::{Error, Result};

const WINDOW: u32 = 4 * 1024 * 1024; // bytes that may be under way

pub(crate) type Credential = HashMap<String, String>;

/// One connection, on which every RPC carries the token of the credential.
#[derive(Clone)]
pub(crate) struct Wire {
    pub client: ToolBusServiceClient<Channel>,
    token: Option<AsciiMetadataValue>,
}

impl Wire {
    /// Connects by the credential as its file has it now, and notes that; while it cannot be used, as where it is about to
    /// be copied, by the one before. Returns why it could not; "" where it could.
    pub async fn renewed(address: &str, path: &str, credential: &mut Option<Credential>) -> (Result<Wire>, String) {
        let proves = |values: &Credential| values.contains_key("token") || values.contains_key("certificate");
        let problem = match read_credential(path) {
            Ok(values) if !proves(&values) && credential.as_ref().is_some_and(proves) => {
                Error::Setup(format!("the credential {path} has neither token nor certificate"))
            }
            Ok(values) => match Wire::connect(address, path, &values).await {
                Err(problem @ Error::Setup(_)) => problem,
                made => {
                    *credential = Some(values);
                    return (made, String::new());
                }
            },
            Err(problem) => problem,
        };
        let Some(values) = credential else { return (Err(problem), String::new()) };
        let made = Wire::connect(address, path, values).await;
        (made, format!("{problem}; using the credential that was read before"))
    }

    async fn connect(address: &str, credential: &str, values: &Credential) -> Result<Wire> {
        let value = |name: &str| values.get(name).map_or("", String::as_str);
        let (prefix, target) = split(address);
        let (name, target) = match target.rsplit_once('@') {
            Some((name, target)) if !prefix.is_empty() => (name, target),
            _ => ("", target),
        };
        let both = !value("key").is_empty() && !value("certificate").is_empty();
        if prefix == "mtls" && !both {
            let why = no_certificate(credential);
            return Err(Error::Setup(format!("the bus at {address} asks for a client certificate, and {why}")));
        }
        let local = ["unix:", "127.0.0.1:", "localhost:", "[::1]:"].iter().any(|host| address.starts_with(host));
        if !value("token").is_empty() && prefix.is_empty() && !local {
            return Err(Error::Setup(format!("a token is not sent to {address} in plain text: write tls:{address}")));
        }
        let uri = match (prefix, target) {
            (_, path) if path.starts_with("unix:") => path.to_owned(),
            ("", _) => format!("http://{target}"),
            _ => format!("https://{target}"),
        };
        let wrong = |_| {
            Error::Setup(format!(
                "the address '{address}' is not HOST:PORT, unix:PATH, tls:HOST:PORT or mtls:HOST:PORT"
            ))
        };
        let mut endpoint = Endpoint::from_shared(uri).map_err(wrong)?;
        endpoint = endpoint
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .http2_keep_alive_interval(Duration::from_secs(30))
            .keep_alive_timeout(Duration::from_secs(10));
        if !prefix.is_empty() {
            let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(value("ca")));
            if both {
                tls = tls.identity(Identity::from_pem(value("certificate"), value("key")));
            }
            if !name.is_empty() {
                tls = tls.domain_name(name);
            }
            let unusable =
                |problem| Error::Setup(format!("the credential {credential} cannot be used: {}", deepest(&problem)));
            endpoint = endpoint.tls_config(tls).map_err(unusable)?;
        }
        let token = match value("token") {
            "" => None,
            token => Some(AsciiMetadataValue::try_from(format!("Bearer {token}")).map_err(|_| {
                Error::Setup(format!("the token of {credential} is not printable ASCII: copy it again"))
            })?),
        };
        let channel = endpoint.connect().await.map_err(|problem| Error::Lost(Code::Unavailable, deepest(&problem)))?;
        let client = ToolBusServiceClient::new(channel).max_decoding_message_size(usize::MAX);
        Ok(Wire { client, token })
    }

    /// Returns the request of an RPC.
    pub fn request<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        if let Some(token) = &self.token {
            request.metadata_mut().insert("authorization", token.clone());
        }
        request
    }
}

/// Returns the prefix of an address, `tls` or `mtls` or nothing, and what follows it.
fn split(address: &str) -> (&str, &str) {
    match address.split_once(':') {
        Some((prefix @ ("tls" | "mtls"), target)) => (prefix, target),
        _ => ("", address),
    }
}

fn no_certificate(path: &str) -> String {
    if path.is_empty() {
        return "there is no credential: name its file in TOOLBUS_CREDENTIAL (toolbus keys add NAME -o FILE)".into();
    }
    format!(
        "the credential {path} has none: write one with toolbus keys add NAME -o FILE, and mtls: before the address"
    )
}

/// Returns why a server that is there does not answer, and how to fix it, where more is known than the text of tonic: that
/// does not say that it spoke without TLS, or that the connection ended because of a client's certificate.
pub(crate) async fn why_unanswered(address: &str, path: &str, text: &str, connected: bool) -> Option<String> {
    let (prefix, target) = split(address);
    if prefix.is_empty() {
        let speaks_tls = connected && !target.starts_with("unix:") && speaks_tls(target).await;
        return speaks_tls.then(|| {
            format!("the server at {address} speaks TLS: write tls:{address} or mtls:{address}, and name a credential in TOOLBUS_CREDENTIAL")
        });
    }
    let values = read_credential(path).unwrap_or_default();
    let name = values.get("name").map_or("NAME", String::as_str);
    let renewal = format!("write it anew on the machine of the bus with toolbus keys renew {name}, and copy it here");
    let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
    let server = format!("the certificate of the server at {address}");
    Some(if has(&["InvalidContentType"]) {
        format!(
            "the server at {address} does not speak TLS: use the port of a listener with TLS, or write {target} for a bus of this machine"
        )
    } else if has(&["expired", "Expired", "not valid yet", "NotValidYet"]) {
        format!(
            "{server} has expired or is not valid yet: check the clock of this machine, or renew it there with toolbus keys init"
        )
    } else if has(&["not valid for name", "NotValidForName"]) {
        let names = text.split_once("only valid for ").map_or("other names", |(_, names)| names);
        let names = names.replace("DnsName(", "").replace("IpAddress(", "").replace(['"', ')'], "");
        format!(
            "{server} is for {names}: use one of these names in the address, or add this one there with toolbus keys init --name"
        )
    } else if has(&["UnknownIssuer", "BadSignature"]) && path.is_empty() {
        format!(
            "{server} is not signed by an authority that is trusted here: check the address, or name a credential in TOOLBUS_CREDENTIAL"
        )
    } else if has(&["UnknownIssuer", "BadSignature"]) {
        format!("{server} is not signed by the ca of the credential {path}: check the address, or {renewal}")
    } else if !connected || !speaks_tls(target).await {
        return None; // the server is gone, which says nothing of certificates
    } else if values.contains_key("certificate") {
        format!(
            "the bus at {address} does not accept the certificate of the credential {path}, which has expired or is for another bus: {renewal}"
        )
    } else {
        format!("the bus at {address} asks for a client certificate, and {}", no_certificate(path))
    })
}

/// Tells whether a server shows a certificate; nothing is sent to it.
async fn speaks_tls(target: &str) -> bool {
    let trust = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(""));
    let Ok(endpoint) = Endpoint::from_shared(format!("https://{target}")).and_then(|each| each.tls_config(trust))
    else {
        return false;
    };
    match endpoint.connect().await {
        Ok(_) => true,
        Err(problem) => deepest(&problem).contains("peer certificate"),
    }
}

/// Returns how a stream ended. What tonic makes of a broken connection counts as such, whichever code it chose.
pub(crate) fn end_of(status: &Status) -> Error {
    match status.source() {
        Some(problem) => Error::Lost(Code::Unavailable, deepest(problem)),
        None => Error::Refused(status.code(), status.message().to_owned()),
    }
}

fn deepest(problem: &(dyn std::error::Error + 'static)) -> String {
    problem.source().map_or_else(|| problem.to_string(), deepest)
}

/// Returns the values of a credential file; none without a path.
pub(crate) fn read_credential(path: &str) -> Result<Credential> {
    if path.is_empty() {
        return Ok(HashMap::new());
    }
    let unreadable = |problem| Error::Setup(format!("the credential {path} cannot be read: {problem}"));
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        if std::fs::metadata(path).map_err(unreadable)?.mode() & 0o077 != 0 {
            return Err(Error::Setup(format!("other users can read the credential {path}: chmod 600 {path}")));
        }
    }
    let content = std::fs::read_to_string(path).map_err(unreadable)?;
    Ok(texts_of(&content))
}

/// Returns the texts of a TOML file as `toolbus keys add` writes it: in one line, or between three quotes.
fn texts_of(content: &str) -> HashMap<String, String> {
    let mut values = HashMap::new();
    let mut rest = content;
    while !rest.is_empty() {
        let start = content.len() - rest.len();
        let (line, next) = rest.split_once('\n').unwrap_or((rest, ""));
        rest = next;
        let Some((name, value)) = line.split_once('=') else { continue };
        let value = value.trim_start();
        let text = match ["\"\"\"", "'''"].iter().find_map(|quotes| value.strip_prefix(quotes).map(|_| quotes)) {
            Some(quotes) => {
                let from = start + line.find(quotes).unwrap_or(0) + quotes.len();
                let (text, after) = content[from..].split_once(quotes).unwrap_or_default();
                rest = after;
                Some(text.trim_start_matches(['\r', '\n']).to_owned())
            }
            None if value.starts_with('\'') => value.split('\'').nth(1).map(str::to_owned),
            None => serde_json::Deserializer::from_str(value).into_iter::<String>().next().and_then(|text| text.ok()),
        };
        values.extend(text.map(|text| (name.trim().to_owned(), text)));
    }
    values
}

#[cfg(test)]
mod tests {
    #[tokio::test]
    async fn a_server_that_ends_connections_without_tls_does_not_refuse_a_certificate() {
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("mtls:{}", server.local_addr().unwrap());
        tokio::spawn(async move { while server.accept().await.is_ok() {} });
        assert_eq!(super::why_unanswered(&address, "", "connection reset", true).await, None);
    }

    #[test]
    fn a_credential_is_read_in_all_ways_in_which_toml_writes_texts() {
        let file = "# of ann\naddress = \"tls:h:1\" # where\nname = 'a\\b'\nexpires = 2027-01-01T00:00:00Z\n\ntoken=\"t\\\"1\"\nca = \"\"\"\n-----BEGIN\nx=\n-----END\n\"\"\"\nkey = '''k\n'''\n";
        let values = super::texts_of(file);
        let value = |name: &str| values.get(name).map_or("", String::as_str);
        assert_eq!([value("address"), value("name"), value("token")], ["tls:h:1", "a\\b", "t\"1"]);
        assert_eq!([value("ca"), value("key"), value("expires")], ["-----BEGIN\nx=\n-----END\n", "k\n", ""]);
        assert_eq!(super::texts_of("a = \"b\"").get("a").unwrap(), "b");
    }
}
