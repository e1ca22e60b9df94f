//! serde for types that are written as strings, by their `Display` and `FromStr`: `#[serde(with = "display_from_str")]`.

use std::fmt::{self, Display};
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::str::FromStr;

use serde::de::{Error, Visitor};
use serde::{Deserializer, Serializer};

/// Writes the `Display` form.
pub fn serialize<T: Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

/// Reads what `FromStr` accepts.
pub fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: FromStr<Err: Display>,
    D: Deserializer<'de>,
{
    deserializer.deserialize_str(FromStrVisitor(PhantomData))
}

struct FromStrVisitor<T>(PhantomData<T>);

impl<T: FromStr<Err: Display>> Visitor<'_> for FromStrVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        text.trim().parse().map_err(E::custom)
    }
}

/// For `Option<T>`.
pub mod optional {
    use serde::{Deserialize, Serialize};

    use super::{AsString, Deserializer, Display, FromStr, Serializer};

    /// Writes the `Display` form.
    pub fn serialize<T: Display + Copy, S: Serializer>(
        value: &Option<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.map(AsString).serialize(serializer)
    }

    /// Reads what `FromStr` accepts.
    pub fn deserialize<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        Ok(Option::<AsString<T>>::deserialize(deserializer)?.map(|text| text.0))
    }
}

/// For `Option<Vec<T>>`.
pub mod optional_list {
    use serde::{Deserialize, Serialize};

    use super::{AsString, Deserializer, Display, FromStr, Serializer};

    /// Writes the `Display` form.
    pub fn serialize<T: Display + Copy, S: Serializer>(
        values: &Option<Vec<T>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let texts = values
            .as_ref()
            .map(|values| values.iter().copied().map(AsString).collect::<Vec<_>>());
        texts.serialize(serializer)
    }

    /// Reads what `FromStr` accepts.
    pub fn deserialize<'de, T, D>(deserializer: D) -> Result<Option<Vec<T>>, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        let texts = Option::<Vec<AsString<T>>>::deserialize(deserializer)?;
        Ok(texts.map(|texts| texts.into_iter().map(|text| text.0).collect()))
    }
}

/// Makes the two functions usable inside other types.
struct AsString<T>(T);

impl<T: Display> serde::Serialize for AsString<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serialize(&self.0, serializer)
    }
}

impl<'de, T: FromStr<Err: Display>> serde::Deserialize<'de> for AsString<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize(deserializer).map(Self)
    }
}

/// Deserializes the address of a listener.
pub fn listen<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    deserialize::<ListenAddress, D>(deserializer).map(|address| address.0)
}

struct ListenAddress(SocketAddr);

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numeric = text
            .strip_prefix("localhost:")
            .map(|port| format!("127.0.0.1:{port}"));
        numeric.as_deref().unwrap_or(text).parse().map(Self).map_err(|_| {
            format!("`{text}` is not an address: write an IP address and a port, such as 127.0.0.1:9464")
        })
    }
}
