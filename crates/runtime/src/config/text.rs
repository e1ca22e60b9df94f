//! Values that people write as text, read and written by serde: `#[serde(with = "text")]`.

use std::fmt::{self, Display};
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::str::FromStr;

use serde::de::{Error, Visitor};
use serde::{Deserializer, Serializer};

/// Writes a value as its text.
pub(super) fn serialize<T: Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

/// Reads a value from its text.
pub(super) fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: FromStr<Err: Display>,
    D: Deserializer<'de>,
{
    deserializer.deserialize_str(Parse(PhantomData))
}

struct Parse<T>(PhantomData<T>);

impl<T: FromStr<Err: Display>> Visitor<'_> for Parse<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        text.trim().parse().map_err(E::custom)
    }
}

/// A value that may be missing.
pub(super) mod optional {
    use serde::{Deserialize, Serialize};

    use super::{Deserializer, Display, FromStr, Serializer, Text};

    pub(in crate::config) fn serialize<T: Display + Copy, S: Serializer>(
        value: &Option<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.map(Text).serialize(serializer)
    }

    pub(in crate::config) fn deserialize<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        Ok(Option::<Text<T>>::deserialize(deserializer)?.map(|text| text.0))
    }
}

/// A list that may be missing.
pub(super) mod optional_list {
    use serde::{Deserialize, Serialize};

    use super::{Deserializer, Display, FromStr, Serializer, Text};

    pub(in crate::config) fn serialize<T: Display + Copy, S: Serializer>(
        values: &Option<Vec<T>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let texts = values
            .as_ref()
            .map(|values| values.iter().copied().map(Text).collect::<Vec<_>>());
        texts.serialize(serializer)
    }

    pub(in crate::config) fn deserialize<'de, T, D>(deserializer: D) -> Result<Option<Vec<T>>, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        let texts = Option::<Vec<Text<T>>>::deserialize(deserializer)?;
        Ok(texts.map(|texts| texts.into_iter().map(|text| text.0).collect()))
    }
}

/// A value that is read and written as text, inside of other types.
struct Text<T>(T);

impl<T: Display> serde::Serialize for Text<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serialize(&self.0, serializer)
    }
}

impl<'de, T: FromStr<Err: Display>> serde::Deserialize<'de> for Text<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize(deserializer).map(Self)
    }
}

/// Reads an address to listen on.
pub(super) fn listen<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    deserialize::<Listen, D>(deserializer).map(|listen| listen.0)
}

struct Listen(SocketAddr);

impl FromStr for Listen {
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
