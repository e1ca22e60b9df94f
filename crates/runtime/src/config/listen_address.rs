//! The address of a listener: `#[serde(with = "listen_address")]`.

use std::net::SocketAddr;

use serde::de::{Deserialize as _, Error as _};
use serde::{Deserializer, Serialize as _, Serializer};

/// Writes IP address and port.
pub fn serialize<S: Serializer>(address: &SocketAddr, serializer: S) -> Result<S::Ok, S::Error> {
    address.serialize(serializer)
}

/// Reads an IP address or `localhost`, and a port.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    let text = String::deserialize(deserializer)?;
    let text = text.trim();
    let numeric = text
        .strip_prefix("localhost:")
        .map(|port| format!("127.0.0.1:{port}"));
    numeric.as_deref().unwrap_or(text).parse().map_err(|_| {
        let rule = "write an IP address and a port, such as 127.0.0.1:9464";
        D::Error::custom(format!("`{text}` is not an address: {rule}"))
    })
}
