//! A file whose contents are replaced while the process runs.
//!
//! The contents are compared, not the times: Kubernetes replaces a Secret by changing a symbolic link to the directory of its
//! files.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::metrics::gauge::Gauge;
use redeliver_core::wait::LogThrottle;
use ring::digest::{SHA256, digest};

use super::Shared;

type Parse<T> = fn(&[u8], &std::path::Path) -> Result<T, String>;

/// A file and what it contains. While it is missing or invalid, the former contents apply.
pub(super) struct WatchedFile<T> {
    path: PathBuf,
    parse: Parse<T>,
    value: Shared<T>,
    seen: Mutex<Seen>,
    stale: Gauge,
}

struct Seen {
    /// The hash of what was read last, or why it could not be read.
    contents: Result<Vec<u8>, String>,
    /// What is wrong with the contents.
    problem: Option<String>,
    throttle: LogThrottle,
}

impl<T> WatchedFile<T> {
    /// Reads the file. `stale` is 1 while it cannot be used.
    ///
    /// # Errors
    /// What is wrong with the file, with its path.
    pub(super) fn load(path: PathBuf, parse: Parse<T>, stale: Gauge) -> Result<Self, String> {
        let bytes = read(&path)?;
        stale.set(0);
        Ok(Self {
            value: Shared::new(parse(&bytes, &path)?),
            path,
            parse,
            seen: Mutex::new(Seen {
                contents: Ok(hash(&bytes)),
                problem: None,
                throttle: LogThrottle::default(),
            }),
            stale,
        })
    }

    /// The last valid contents.
    pub(super) fn value(&self) -> Arc<T> {
        self.value.get()
    }

    /// Reads the file, and uses its contents if they have changed and are valid. Blocks.
    pub(super) fn check(&self) {
        let read = read(&self.path);
        let contents = read.as_ref().map(|bytes| hash(bytes)).map_err(Clone::clone);
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.contents != contents {
            seen.throttle.reset();
            seen.problem = match read.and_then(|bytes| (self.parse)(&bytes, &self.path)) {
                Ok(value) => {
                    self.value.set(value);
                    tracing::info!(file = %self.path.display(), "using the changed file");
                    None
                }
                Err(problem) => Some(problem),
            };
            seen.contents = contents;
        }
        self.stale.set(seen.problem.is_some().into());
        let Seen {
            problem, throttle, ..
        } = &mut *seen;
        if let Some(problem) = problem
            && throttle.should_log()
        {
            tracing::warn!(problem, "cannot use a changed file; using its former contents");
        }
    }
}

impl<T> fmt::Debug for WatchedFile<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WatchedFile")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

fn read(path: &std::path::Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

fn hash(bytes: &[u8]) -> Vec<u8> {
    digest(&SHA256, bytes).as_ref().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(bytes: &[u8], _: &std::path::Path) -> Result<u32, String> {
        let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
        text.parse().map_err(|_| "not a number".to_owned())
    }

    #[test]
    fn changed_contents_apply_and_broken_ones_do_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("number");
        let stale = Gauge::default();
        assert!(WatchedFile::load(path.clone(), number, stale.clone()).is_err());
        std::fs::write(&path, "1").unwrap();
        let file = WatchedFile::load(path.clone(), number, stale.clone()).unwrap();
        let check = |write: Option<&str>, expected: u32, is_stale: i64| {
            match write {
                Some(text) => std::fs::write(&path, text).unwrap(),
                None => std::fs::remove_file(&path).unwrap(),
            }
            file.check();
            assert_eq!((*file.value(), stale.get()), (expected, is_stale), "{write:?}");
        };
        check(Some("1"), 1, 0);
        check(Some("2"), 2, 0);
        check(Some("x"), 2, 1);
        check(Some("x"), 2, 1);
        check(Some("2"), 2, 0);
        check(None, 2, 1);
        check(Some("2"), 2, 0);
        check(Some("3"), 3, 0);
    }

    #[cfg(unix)]
    #[test]
    fn a_symbolic_link_that_changes_its_target_is_a_change() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for version in ["1", "2"] {
            std::fs::create_dir(at(version)).unwrap();
            std::fs::write(at(version).join("number"), version).unwrap();
        }
        let link = |target: &str| {
            std::os::unix::fs::symlink(at(target), at("new")).unwrap();
            std::fs::rename(at("new"), at("data")).unwrap();
        };
        link("1");
        let file = WatchedFile::load(at("data").join("number"), number, Gauge::default()).unwrap();
        link("2");
        file.check();
        assert_eq!(*file.value(), 2);
    }
}
