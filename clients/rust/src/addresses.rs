//! Reads addresses of several buses: a list with commas, and names of DNS (`dns:`), which are looked up again and again.
use std::time::Duration;

use tokio::time::{Instant, timeout};
use tonic::Code;

use crate::values::{Error, Result, random};

const LOOK_UP: Duration = Duration::from_secs(5); // between two look-ups of a name, and for the answer to one
const MOST: usize = 64; // buses of one address

/// An address as it was written, and the buses that it means now.
#[derive(Clone)]
pub(crate) struct Addresses {
    entries: Vec<Entry>,
    looked: Option<Instant>, // when names were looked up last; None before
    /// Those of the newest answers, in their order.
    pub known: Vec<String>,
}

#[derive(Clone)]
enum Entry {
    Buses(Vec<String>),
    Name { prefix: &'static str, host: String, port: u16, answer: Vec<String> },
}

impl Addresses {
    pub fn parse(text: &str) -> Result<Self> {
        let mut written: Vec<String> = Vec::new();
        for part in text.split(',') {
            let each = part.trim_start();
            let begins = each.starts_with('[') || each.find([':', '/']).is_some_and(|at| each[at..].starts_with(':'));
            match written.last_mut() {
                Some(path) if !begins => path.extend([",", part]), // of a socket
                _ => written.push(each.into()),
            }
        }
        let entries = written.iter().map(|each| Entry::parse(each.trim_end())).collect::<Result<Vec<_>>>()?;
        if entries.len() > MOST {
            return Err(Error::Setup(format!("the address has {} buses, it may have {MOST}", entries.len())));
        }
        let mut addresses = Addresses { entries, looked: None, known: Vec::new() };
        addresses.collect();
        Ok(addresses)
    }

    pub fn has_names(&self) -> bool {
        self.entries.iter().any(|entry| matches!(entry, Entry::Name { .. }))
    }

    fn collect(&mut self) {
        self.known.clear();
        for entry in &self.entries {
            let (Entry::Name { answer: buses, .. } | Entry::Buses(buses)) = entry;
            for bus in buses {
                if !self.known.contains(bus) {
                    self.known.push(bus.clone()); // at one bus twice a peer would replace itself
                }
            }
        }
        self.known.truncate(MOST);
    }

    /// Looks the names up, unless that was done a moment ago. A name without an answer has that of before; the error says
    /// why there is none.
    pub async fn look_up(&mut self) -> Result<()> {
        if self.looked.is_some_and(|looked| looked.elapsed() < LOOK_UP) && !self.known.is_empty() {
            return Ok(());
        }
        let mut found = Ok(());
        for entry in &mut self.entries {
            let Entry::Name { prefix, host, port, answer } = entry else { continue };
            let text = match timeout(LOOK_UP, tokio::net::lookup_host((host.as_str(), *port))).await {
                Ok(Ok(addresses)) => {
                    // The certificate is that of the name.
                    let name = if prefix.is_empty() { String::new() } else { format!("{prefix}{host}@") };
                    *answer = addresses.map(|address| format!("{name}{address}")).collect();
                    answer.dedup();
                    if !answer.is_empty() {
                        let first = random() as usize % answer.len(); // so that hosts spread over the buses
                        answer.rotate_left(first);
                    }
                    continue;
                }
                Ok(Err(problem)) => problem.to_string(),
                Err(_) => format!("no answer within {LOOK_UP:?}"),
            };
            found = Err(Error::Lost(Code::Unavailable, format!("DNS has no address for {host}: {text}")));
        }
        self.looked = Some(Instant::now());
        self.collect();
        if self.known.is_empty() { found } else { Ok(()) }
    }

    /// Waits until names are to be looked up again.
    pub async fn due() {
        tokio::time::sleep(LOOK_UP).await;
    }
}

impl Entry {
    fn parse(address: &str) -> Result<Self> {
        let Some(rest) = address.strip_prefix("dns:") else {
            return if is_bus(address) {
                Ok(Entry::Buses(vec![address.into()]))
            } else {
                Err(Error::Setup(format!(
                    "the address '{address}' is not HOST:PORT, unix:PATH, tls:HOST:PORT, mtls:HOST:PORT or dns:NAME:PORT"
                )))
            };
        };
        let split = ["mtls:", "tls:", ""].into_iter().find_map(|each| Some((each, rest.strip_prefix(each)?)));
        let (prefix, target) = split.unwrap_or(("", rest));
        match target.rsplit_once(':').map(|(host, port)| (host, port.parse())) {
            Some((host, Ok(port))) if port > 0 && !host.is_empty() && !host.contains([':', '/', '@']) => {
                Ok(Entry::Name { prefix, host: host.into(), port, answer: Vec::new() })
            }
            _ => Err(Error::Setup(format!(
                "the address '{address}' must be dns:NAME:PORT, dns:tls:NAME:PORT or dns:mtls:NAME:PORT"
            ))),
        }
    }
}

/// Tells whether a connection can use an address.
fn is_bus(address: &str) -> bool {
    if let Some(path) = address.strip_prefix("unix:") {
        return !path.is_empty();
    }
    let secure = ["mtls:", "tls:"].iter().find_map(|prefix| address.strip_prefix(prefix));
    let target = secure.map_or(address, |target| target.rsplit_once('@').map_or(target, |(_, target)| target));
    target.rsplit_once(':').is_some_and(|(host, port)| {
        let bracketed = host.starts_with('[') && host.ends_with(']');
        let named =
            !host.is_empty() && !host.contains(|letter: char| letter.is_whitespace() || ":/?#@[]".contains(letter));
        (bracketed || named) && port.parse::<u16>().is_ok_and(|port| port > 0)
    })
}

#[cfg(test)]
mod tests {
    use super::Addresses;

    #[test]
    fn a_list_is_read_with_commas_in_paths_and_names_of_dns() {
        let read =
            |text: &str| Addresses::parse(text).map(|addresses| (addresses.known.clone(), addresses.has_names()));
        let several = read("a:1, unix:/run/x,y/bus ,[::1]:2,dns:mtls:bus.internal:48931, a:1").unwrap();
        assert_eq!(several, (["a:1", "unix:/run/x,y/bus", "[::1]:2"].map(String::from).to_vec(), true));
        assert_eq!(read("127.0.0.1:1").unwrap(), (vec!["127.0.0.1:1".to_owned()], false));
        for wrong in ["dns:bus.internal", "dns:tls:1", "dns:a:b", "dns:a:0", "a:1,dns:tcp:a:1"] {
            assert!(read(wrong).unwrap_err().to_string().contains("must be dns:NAME:PORT"), "{wrong}");
        }
        for wrong in ["nowhere", "h:70000", "http://h:1", "[::1]", "tls:h", "a:1,,b:1"] {
            assert!(read(wrong).unwrap_err().to_string().contains("is not HOST:PORT"), "{wrong}");
        }
        assert_eq!(read("tls:bus@10.0.0.1:2").unwrap().0, ["tls:bus@10.0.0.1:2"]);
        assert!(read(&["a:1"; 65].join(",")).unwrap_err().to_string().contains("may have 64"));
    }
}
