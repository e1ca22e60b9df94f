//! Checks whether a broker is ready, without a client library.
//!
//! A broker listens before the controller allows it to serve. So the probe sends a Metadata request, whose response lists only
//! brokers that the controller has accepted (Kafka protocol guide, Metadata, version 4).

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

const METADATA: i16 = 3;
/// The oldest version that can forbid the creation of topics. Brokers from 1.0 to 4.x support it.
const VERSION: i16 = 4;
const CORRELATION: i32 = 7;
/// An upper bound for the response, in case another server uses the port.
const MAX_RESPONSE: usize = 1 << 20;

/// Succeeds if the broker at `address` responds and lists at least one broker.
pub(crate) fn answers(address: SocketAddr) -> Result<()> {
    let timeout = Duration::from_secs(2);
    let mut stream = TcpStream::connect_timeout(&address, timeout).context("connecting")?;
    stream
        .set_read_timeout(Some(timeout))
        .context("setting a read timeout")?;
    stream
        .write_all(&request())
        .context("sending a metadata request")?;
    let mut size = [0; 4];
    stream
        .read_exact(&mut size)
        .context("reading the answer's size")?;
    let size = usize::try_from(i32::from_be_bytes(size)).context("reading the answer's size")?;
    ensure!(
        size <= MAX_RESPONSE,
        "not an answer of Kafka's: {size} bytes announced"
    );
    let mut answer = vec![0; size];
    stream.read_exact(&mut answer).context("reading the answer")?;
    match brokers(&answer) {
        Some(1..) => Ok(()),
        Some(_) => bail!("the broker answers, but is not yet let in by the controller"),
        None => bail!("not an answer of Kafka's: {size} bytes"),
    }
}

/// A Metadata request for no topics, prefixed with its length.
fn request() -> Vec<u8> {
    let mut body = Vec::new();
    body.extend(METADATA.to_be_bytes());
    body.extend(VERSION.to_be_bytes());
    body.extend(CORRELATION.to_be_bytes());
    body.extend((-1_i16).to_be_bytes()); // no client id
    body.extend(0_i32.to_be_bytes()); // no topics
    body.push(0); // create nothing
    let mut request = u32::try_from(body.len()).unwrap_or(0).to_be_bytes().to_vec();
    request.extend(body);
    request
}

/// The number of brokers in the response: the length of the array after the correlation id and the throttle time.
fn brokers(answer: &[u8]) -> Option<i32> {
    let number = |at: usize| Some(i32::from_be_bytes(answer.get(at..at + 4)?.try_into().ok()?));
    (number(0)? == CORRELATION).then(|| number(8))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brokers_of_response_are_counted() {
        let answer = |brokers: i32| [CORRELATION.to_be_bytes(), [0; 4], brokers.to_be_bytes()].concat();
        assert_eq!(brokers(&answer(1)), Some(1));
        assert_eq!(brokers(&answer(0)), Some(0));
        assert_eq!(brokers(b"HTTP/1.1 400 Bad Request"), None);
        assert_eq!(brokers(b""), None);
    }
}
