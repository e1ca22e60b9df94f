//! JSON documents from untrusted records, read by field.
//!
//! The rest of a document is checked, but not evaluated: numbers beyond a double, halves of surrogate pairs, and any depth are JSON. What is
//! read is text of the document, so that no field has a meaning for `serde_json`, as those with some names have for its `Value`.

mod decimal;
mod indent;
mod parse;

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer as _, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

pub use decimal::Decimal;
pub use indent::indented;
pub use parse::{has_private_name, parse};

/// A string, number or boolean of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scalar<'d> {
    /// The contents of a string: UTF-8, except that half of a surrogate pair without the other one is three bytes (WTF-8).
    String(Cow<'d, [u8]>),
    /// A number.
    Number(Decimal<'d>),
    /// A boolean.
    Bool(bool),
}

impl<'d> Scalar<'d> {
    /// Reads a value. `None` if it is null, an array or an object.
    #[must_use]
    pub fn of(value: &'d RawValue) -> Option<Self> {
        match value.get() {
            "true" => Some(Self::Bool(true)),
            "false" => Some(Self::Bool(false)),
            text if text.starts_with('"') => serde_json::from_str(text)
                .ok()
                .map(|Text(text)| Self::String(text)),
            text => Decimal::of(text).map(Self::Number),
        }
    }

    /// The contents of a string, the name of a boolean, or the text of a number, see [`Decimal::text`].
    #[must_use]
    pub fn into_text(self) -> Cow<'d, [u8]> {
        match self {
            Self::String(text) => text,
            Self::Number(number) => match number.text() {
                Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
                Cow::Owned(text) => Cow::Owned(text.into_bytes()),
            },
            Self::Bool(true) => Cow::Borrowed(b"true"),
            Self::Bool(false) => Cow::Borrowed(b"false"),
        }
    }
}

/// The string, number or boolean at a JSON pointer (RFC 6901), see [`at_each`].
///
/// # Errors
/// If the bytes are not a JSON document.
pub fn scalar_at<'d>(document: &'d [u8], pointer: &str) -> serde_json::Result<Option<Scalar<'d>>> {
    let value = at_each(document, &[pointer])?.pop().flatten();
    Ok(value.and_then(Scalar::of))
}

/// The values at JSON pointers (RFC 6901), in the order of these. Of fields with the same name, the last one counts. Each object and array on
/// the way is read once.
///
/// # Errors
/// If the bytes are not a JSON document.
pub fn at_each<'d>(
    document: &'d [u8],
    pointers: &[impl AsRef<str>],
) -> serde_json::Result<Vec<Option<&'d RawValue>>> {
    let document: &RawValue = serde_json::from_slice(document)?;
    let mut found = vec![None; pointers.len()];
    let pointers = pointers.iter().map(AsRef::as_ref).enumerate();
    // Not recursive, because a stack that overflows ends the process.
    let mut open: Vec<(&RawValue, Vec<(usize, &str)>)> = vec![(document, pointers.collect())];
    while let Some((value, paths)) = open.pop() {
        let mut members: Vec<Member<'d, '_>> = Vec::new();
        for (index, path) in paths {
            let Some(path) = path.strip_prefix('/') else {
                found[index] = path.is_empty().then_some(value);
                continue;
            };
            let (name, rest) = path.split_at(path.find('/').unwrap_or(path.len()));
            match members.iter_mut().find(|member| member.escaped == name) {
                Some(member) => member.paths.push((index, rest)),
                None => members.push(Member::new(name, (index, rest))),
            }
        }
        if members.is_empty() {
            continue;
        }
        let mut reader = serde_json::Deserializer::from_str(value.get());
        match value.get().as_bytes().first() {
            Some(b'{') => reader.deserialize_map(Members(&mut members))?,
            Some(b'[') => reader.deserialize_seq(Members(&mut members))?,
            _ => {}
        }
        open.extend(
            members
                .into_iter()
                .filter_map(|member| Some((member.value?, member.paths))),
        );
    }
    Ok(found)
}

/// The fields of an object in their order, also those with the same name: the JSON text of the name, and the value.
///
/// # Errors
/// If the value is not an object.
pub fn fields(object: &RawValue) -> serde_json::Result<Vec<(&RawValue, &RawValue)>> {
    struct Fields;

    impl<'d> Visitor<'d> for Fields {
        type Value = Vec<(&'d RawValue, &'d RawValue)>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<M: MapAccess<'d>>(self, mut map: M) -> Result<Self::Value, M::Error> {
            let mut fields = Vec::new();
            while let Some(field) = map.next_entry()? {
                fields.push(field);
            }
            Ok(fields)
        }
    }

    serde_json::Deserializer::from_str(object.get()).deserialize_map(Fields)
}

/// A field or an element that is looked for.
struct Member<'d, 'p> {
    /// As in a pointer.
    escaped: &'p str,
    name: Cow<'p, str>,
    /// The pointers that lead to it or into it: their indexes, and what follows the name in them.
    paths: Vec<(usize, &'p str)>,
    value: Option<&'d RawValue>,
}

impl<'p> Member<'_, 'p> {
    fn new(escaped: &'p str, path: (usize, &'p str)) -> Self {
        let name = match escaped.contains('~') {
            true => Cow::Owned(escaped.replace("~1", "/").replace("~0", "~")),
            false => Cow::Borrowed(escaped),
        };
        Self {
            escaped,
            name,
            paths: vec![path],
            value: None,
        }
    }

    /// The index of an element, which has no zeros or signs before it.
    fn index(&self) -> Option<usize> {
        let is_plain = &*self.name == "0" || !self.name.starts_with(['0', '+']);
        self.name.parse().ok().filter(|_| is_plain)
    }
}

/// Looks for members of an object or an array.
struct Members<'m, 'd, 'p>(&'m mut [Member<'d, 'p>]);

impl<'d> Visitor<'d> for Members<'_, 'd, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object or an array")
    }

    fn visit_map<M: MapAccess<'d>>(self, mut map: M) -> Result<(), M::Error> {
        while let Some(Text(name)) = map.next_key()? {
            match self.0.iter_mut().find(|member| member.name.as_bytes() == &*name) {
                Some(member) => member.value = Some(map.next_value()?),
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }

    fn visit_seq<S: SeqAccess<'d>>(self, mut list: S) -> Result<(), S::Error> {
        let mut wanted: Vec<_> = self
            .0
            .iter_mut()
            .filter_map(|member| Some((member.index()?, member)))
            .collect();
        for index in 0.. {
            let is_element = match wanted.iter_mut().find(|(wanted, _)| *wanted == index) {
                Some((_, member)) => {
                    member.value = list.next_element()?;
                    member.value.is_some()
                }
                None => list.next_element::<IgnoredAny>()?.is_some(),
            };
            if !is_element {
                break;
            }
        }
        Ok(())
    }
}

/// The contents of a string. With halves of surrogate pairs, `serde_json` reads it as bytes only.
struct Text<'d>(Cow<'d, [u8]>);

impl<'d> Deserialize<'d> for Text<'d> {
    fn deserialize<D: serde::Deserializer<'d>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;

        impl<'d> Visitor<'d> for TextVisitor {
            type Value = Text<'d>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_borrowed_bytes<E: Error>(self, text: &'d [u8]) -> Result<Text<'d>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_bytes<E: Error>(self, text: &[u8]) -> Result<Text<'d>, E> {
                Ok(Text(Cow::Owned(text.to_vec())))
            }
        }

        deserializer.deserialize_bytes(TextVisitor)
    }
}

#[cfg(test)]
mod tests;
