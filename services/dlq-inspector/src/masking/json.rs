//! Masks fields of a JSON document. All other bytes stay as they are.
//!
//! A parser that keeps values would lose the order and the duplicates of members, and the digits of numbers. So the document is checked with
//! `serde_json`, and then scanned for the places to replace. The time is linear in the length of the document, for each path.

use serde::de::IgnoredAny;

use super::text::MASK;
use crate::config::{FieldPath, Step};

/// Documents in which a path leads deeper than this are not masked but withheld. `serde_json` has the same limit.
const MAX_DEPTH: usize = 128;

/// A document without the masked fields.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MaskedDocument<'p> {
    pub(super) text: Vec<u8>,
    /// The paths that were found.
    pub(super) found: Vec<&'p FieldPath>,
}

/// Masks the fields at these paths. `None` if the document is not a JSON object or array, so that its fields
/// cannot be found: a text or a number at the top can be a whole document in another encoding.
pub(super) fn mask<'p>(document: &[u8], paths: &[&'p FieldPath]) -> Option<MaskedDocument<'p>> {
    let text = std::str::from_utf8(document).ok()?;
    serde_json::from_str::<IgnoredAny>(text).ok()?;
    let mut masker = Masker {
        text,
        at: 0,
        copied: 0,
        masked: Vec::with_capacity(text.len()),
        paths,
        found: vec![false; paths.len()],
    };
    masker.skip_space();
    if !matches!(masker.next(), Some(b'{' | b'[')) {
        return None;
    }
    let start: Vec<Progress> = paths.iter().map(|path| Progress::start(path)).collect();
    masker.value(&start, 0)?;
    masker.copy_to(text.len());
    let found = paths.iter().zip(&masker.found);
    Some(MaskedDocument {
        found: found
            .filter(|(_, found)| **found)
            .map(|(path, _)| *path)
            .collect(),
        text: masker.masked,
    })
}

/// Whether one of the paths masks the field at these names, or what contains it.
pub(super) fn masks(path: &FieldPath, names: &[String]) -> bool {
    let mut progress = Progress::start(path);
    for name in names {
        if progress.is_done(path) {
            return true;
        }
        progress = progress.next(path, name);
    }
    progress.is_done(path)
}

/// Whether two names are the same without `_` and the case of ASCII letters. Programs that read JSON often ignore the case, and in the JSON mapping of
/// Protobuf, `card_number` is `cardNumber`.
fn is_same_name(one: &str, other: &str) -> bool {
    letters(one).eq(letters(other))
}

fn letters(name: &str) -> impl Iterator<Item = u8> {
    let bytes = name.bytes().filter(|byte| *byte != b'_');
    bytes.map(|byte| byte.to_ascii_lowercase())
}

/// How far the names on the way to a value follow a path: bit `n` is set if they can be its first `n` steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Progress(u64);

impl Progress {
    fn start(path: &FieldPath) -> Self {
        Self(1).skipping(path)
    }

    /// After one more name, or index of an array.
    fn next(self, path: &FieldPath, name: &str) -> Self {
        let mut next = 0;
        for (index, step) in path.steps().iter().enumerate() {
            if self.0 & 1 << index == 0 {
                continue;
            }
            next |= match step {
                Step::Name(expected) if is_same_name(expected, name) => 2 << index,
                Step::Name(_) => 0,
                Step::Any => 2 << index,
                Step::Deep => 1 << index,
            };
        }
        Self(next).skipping(path)
    }

    /// `**` is also no step at all.
    fn skipping(mut self, path: &FieldPath) -> Self {
        for (index, step) in path.steps().iter().enumerate() {
            if *step == Step::Deep && self.0 & 1 << index != 0 {
                self.0 |= 2 << index;
            }
        }
        self
    }

    fn is_done(self, path: &FieldPath) -> bool {
        self.0 & 1 << path.steps().len() != 0
    }
}

/// Scans a valid document.
struct Masker<'t, 'p> {
    text: &'t str,
    at: usize,
    /// What is before this position is in `masked`.
    copied: usize,
    masked: Vec<u8>,
    paths: &'p [&'p FieldPath],
    found: Vec<bool>,
}

impl Masker<'_, '_> {
    /// Masks the value that comes next, or what is in it.
    fn value(&mut self, progress: &[Progress], depth: usize) -> Option<()> {
        let mut is_masked = false;
        for ((path, progress), found) in self.paths.iter().zip(progress).zip(&mut self.found) {
            if progress.is_done(path) {
                (is_masked, *found) = (true, true);
            }
        }
        if is_masked {
            self.copy_to(self.at);
            self.masked.push(b'"');
            self.masked.extend_from_slice(MASK.as_bytes());
            self.masked.push(b'"');
            self.skip_value()?;
            self.copied = self.at;
            return Some(());
        }
        if progress.iter().all(|progress| *progress == Progress::default()) {
            return self.skip_value();
        }
        match self.next()? {
            b'{' => self.members(progress, depth),
            b'[' => self.elements(progress, depth),
            _ => self.skip_value(),
        }
    }

    fn members(&mut self, progress: &[Progress], depth: usize) -> Option<()> {
        if depth == MAX_DEPTH {
            return None;
        }
        let mut next = vec![Progress::default(); progress.len()];
        self.at += 1;
        loop {
            self.skip_space();
            match self.next()? {
                b'}' => break,
                b',' => self.at += 1,
                _ => {
                    let start = self.at;
                    self.skip_string()?;
                    let name = self.text.get(start..self.at)?;
                    let decoded: String;
                    let name = if name.contains('\\') {
                        // Half of a surrogate pair is not a name that anyone can compare.
                        decoded = serde_json::from_str(name).ok()?;
                        &decoded
                    } else {
                        name.get(1..name.len() - 1)?
                    };
                    self.advance(progress, &mut next, name);
                    self.skip_space();
                    // The colon.
                    self.at += 1;
                    self.skip_space();
                    self.value(&next, depth + 1)?;
                }
            }
        }
        self.at += 1;
        Some(())
    }

    fn elements(&mut self, progress: &[Progress], depth: usize) -> Option<()> {
        if depth == MAX_DEPTH {
            return None;
        }
        let mut next = vec![Progress::default(); progress.len()];
        let mut index = 0_usize;
        self.at += 1;
        loop {
            self.skip_space();
            match self.next()? {
                b']' => break,
                b',' => self.at += 1,
                _ => {
                    self.advance(progress, &mut next, &index.to_string());
                    index += 1;
                    self.value(&next, depth + 1)?;
                }
            }
        }
        self.at += 1;
        Some(())
    }

    fn advance(&self, progress: &[Progress], next: &mut [Progress], name: &str) {
        for ((path, progress), next) in self.paths.iter().zip(progress).zip(next) {
            *next = progress.next(path, name);
        }
    }

    fn skip_value(&mut self) -> Option<()> {
        let mut open = 0_usize;
        loop {
            match self.next()? {
                b'"' => self.skip_string()?,
                b'{' | b'[' => {
                    open += 1;
                    self.at += 1;
                }
                b'}' | b']' => {
                    open -= 1;
                    self.at += 1;
                }
                b',' | b':' | b' ' | b'\t' | b'\n' | b'\r' => self.at += 1,
                _ => self.skip_scalar(),
            }
            if open == 0 {
                return Some(());
            }
        }
    }

    /// A number, `true`, `false` or `null`.
    fn skip_scalar(&mut self) {
        while matches!(
            self.next(),
            Some(b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'+' | b'-' | b'.')
        ) {
            self.at += 1;
        }
    }

    fn skip_string(&mut self) -> Option<()> {
        self.at += 1;
        loop {
            match self.next()? {
                b'"' => break,
                b'\\' => self.at += 2,
                _ => self.at += 1,
            }
        }
        self.at += 1;
        Some(())
    }

    fn skip_space(&mut self) {
        while matches!(self.next(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn next(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn copy_to(&mut self, end: usize) {
        self.masked
            .extend_from_slice(&self.text.as_bytes()[self.copied..end]);
        self.copied = end;
    }
}

#[cfg(test)]
mod tests;
