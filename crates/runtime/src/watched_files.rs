//! Files whose contents are replaced while the process runs: certificates, tokens, keys.
//!
//! [`WatchedFiles`] reads a set of files again and again, and compares the contents, not the times: Kubernetes replaces a
//! Secret by changing a symbolic link to the directory of its files. The files of a set cannot be read at the same instant,
//! and a file may be read while it is written. So changed contents are used, or reported as unusable, only when two
//! successive checks have read the same ones.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use ring::digest::{SHA256, digest};
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use crate::config::InvalidField;

/// The time between two checks, for callers of [`WatchedFiles::check`].
pub const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// The time between the two reads of [`WatchedFiles::check_now`].
const SETTLE_TIME: Duration = Duration::from_millis(50);
/// The maximum size of a file, because files are read again and again. A bundle of all public CAs has 0.2 MB.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// A file of the configuration.
#[derive(Clone, Debug)]
pub struct ConfiguredFile {
    /// The configuration field that contains the path, for messages.
    pub field: String,
    /// The path.
    pub path: PathBuf,
}

/// A file that was read.
#[derive(Clone, Copy)]
pub struct FileContents<'a> {
    file: &'a ConfiguredFile,
    /// What the file contains.
    pub bytes: &'a [u8],
}

impl<'a> FileContents<'a> {
    /// The path, for messages.
    #[must_use]
    pub fn path(self) -> &'a Path {
        &self.file.path
    }

    /// A problem of this file.
    pub fn problem(self, problem: impl Into<String>) -> InvalidField {
        problem_of(self.file, problem)
    }
}

impl fmt::Debug for FileContents<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileContents")
            .field("file", &self.file)
            .finish_non_exhaustive()
    }
}

/// Calls `check` every [`CHECK_INTERVAL`] on a thread for blocking work. Ends only with an error.
///
/// # Errors
/// When `check` panics, or the runtime shuts down.
pub async fn follow(check: impl Fn() + Send + Sync + 'static) -> io::Result<()> {
    let check = Arc::new(check);
    let mut checks = tokio::time::interval(CHECK_INTERVAL);
    checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        checks.tick().await;
        let check = check.clone();
        tokio::task::spawn_blocking(move || check())
            .await
            .map_err(io::Error::other)?;
    }
}

/// Which credentials of the process are not those that its files contain.
#[derive(Clone, Debug, Default)]
pub struct StaleCredentials(Family<SettingLabel, Gauge>);

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct SettingLabel {
    setting: String,
}

impl StaleCredentials {
    /// Registers the metric.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "credentials_stale",
            "1 while the previous credentials are used because changed ones are unusable, else 0",
            metrics.0.clone(),
        );
        metrics
    }

    /// The gauge of a field of the configuration.
    #[must_use]
    pub fn of(&self, setting: impl Into<String>) -> Gauge {
        let setting = setting.into();
        self.0.get_or_create(&SettingLabel { setting }).clone()
    }
}

type Parse<T> = Box<dyn Fn(&[FileContents<'_>]) -> Result<T, InvalidField> + Send + Sync>;

/// A set of files, and the value that they contain together. While changed files cannot be used, the previous value stays.
pub struct WatchedFiles<T> {
    files: Vec<ConfiguredFile>,
    parse: Parse<T>,
    value: watch::Sender<Arc<T>>,
    state: Mutex<State>,
}

struct State {
    used: Digests,
    /// The contents at the last check, if they were not those in use.
    changed: Option<Changed>,
    is_stale: bool,
    stale: Gauge,
}

struct Changed {
    read: Result<Digests, InvalidField>,
    /// Whether two checks have read this, and so it was reported.
    is_reported: bool,
}

/// The hash of each file. The contents themselves may be secret, so they are not kept.
type Digests = Vec<Vec<u8>>;

impl<T> WatchedFiles<T> {
    /// Reads and parses the files. `parse` receives their contents in the order of `files`. Blocks.
    ///
    /// # Errors
    /// When a file cannot be read or parsed. The problem names its field and its path.
    pub fn load(
        files: Vec<ConfiguredFile>,
        parse: impl Fn(&[FileContents<'_>]) -> Result<T, InvalidField> + Send + Sync + 'static,
    ) -> Result<Self, InvalidField> {
        let bytes = read_all(&files)?;
        let value = parse(&contents(&files, &bytes))?;
        Ok(Self {
            files,
            parse: Box::new(parse),
            value: watch::Sender::new(Arc::new(value)),
            state: Mutex::new(State {
                used: digests(&bytes),
                changed: None,
                is_stale: false,
                stale: Gauge::default(),
            }),
        })
    }

    /// The value of the last usable contents.
    #[must_use]
    pub fn value(&self) -> Arc<T> {
        self.value.borrow().clone()
    }

    /// Whether the set has no files, so that its value never changes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Keeps `stale` at 1 while changed files cannot be used, else at 0.
    pub fn observe(&self, stale: Gauge) {
        let mut state = self.state();
        stale.set(state.is_stale.into());
        state.stale = stale;
    }

    /// Reads the files. Returns whether [`value`](Self::value) has changed: the files have other contents than those in use,
    /// the previous check has read the same ones, and they can be parsed. Logs once what is wrong with files that cannot be
    /// used. Call it every [`CHECK_INTERVAL`]. Blocks.
    pub fn check(&self) -> bool {
        let read = read_all(&self.files);
        let seen = read.as_ref().map(|bytes| digests(bytes)).map_err(Clone::clone);
        let mut state = self.state();
        if seen.as_ref() == Ok(&state.used) {
            state.changed = None;
            state.set_stale(false);
            return false;
        }
        match &mut state.changed {
            Some(changed) if changed.read == seen => {
                if std::mem::replace(&mut changed.is_reported, true) {
                    return false;
                }
            }
            _ => {
                state.changed = Some(Changed {
                    read: seen,
                    is_reported: false,
                });
                return false;
            }
        }
        let parsed = read.and_then(|bytes| {
            let value = (self.parse)(&contents(&self.files, &bytes))?;
            Ok((value, digests(&bytes)))
        });
        match parsed {
            Ok((value, used)) => {
                self.value.send_replace(Arc::new(value));
                state.used = used;
                state.changed = None;
                state.set_stale(false);
                let fields = self.fields();
                tracing::info!(fields, "files changed; using the new contents");
                true
            }
            Err(InvalidField { field, problem, .. }) => {
                state.set_stale(true);
                tracing::warn!(
                    field,
                    problem,
                    "changed files are unusable; using the previous contents"
                );
                false
            }
        }
    }

    /// As [`check`](Self::check), for a caller with a reason to expect other contents, such as credentials that were
    /// refused. If the files have changed, reads them a second time after 50 ms, not at the next check. Blocks.
    pub fn check_now(&self) -> bool {
        if self.check() {
            return true;
        }
        let is_new = |changed: &Changed| !changed.is_reported;
        if !self.state().changed.as_ref().is_some_and(is_new) {
            return false;
        }
        // A file may have been read while it was written.
        std::thread::sleep(SETTLE_TIME);
        self.check()
    }

    fn fields(&self) -> String {
        let fields: Vec<&str> = self.files.iter().map(|file| file.field.as_str()).collect();
        fields.join(", ")
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> fmt::Debug for WatchedFiles<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WatchedFiles")
            .field("files", &self.files)
            .finish_non_exhaustive()
    }
}

impl State {
    fn set_stale(&mut self, is_stale: bool) {
        self.is_stale = is_stale;
        self.stale.set(is_stale.into());
    }
}

fn problem_of(file: &ConfiguredFile, problem: impl Into<String>) -> InvalidField {
    InvalidField {
        field: file.field.clone(),
        problem: problem.into(),
        place: None,
    }
}

fn contents<'a>(files: &'a [ConfiguredFile], bytes: &'a [Vec<u8>]) -> Vec<FileContents<'a>> {
    let pairs = files.iter().zip(bytes);
    pairs.map(|(file, bytes)| FileContents { file, bytes }).collect()
}

fn digests(bytes: &[Vec<u8>]) -> Digests {
    let digest = |bytes: &Vec<u8>| digest(&SHA256, bytes).as_ref().to_vec();
    bytes.iter().map(digest).collect()
}

fn read_all(files: &[ConfiguredFile]) -> Result<Vec<Vec<u8>>, InvalidField> {
    let read = |file: &ConfiguredFile| read(&file.path).map_err(|problem| problem_of(file, problem));
    files.iter().map(read).collect()
}

/// The contents of a file of at most 4 MiB.
///
/// # Errors
/// Why it cannot be read, with the path.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, String> {
    let read = || -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        File::open(path)?
            .take(MAX_FILE_BYTES + 1)
            .read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let path = path.display();
    let bytes = read().map_err(|error| format!("cannot read {path}: {error}"))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(format!("{path} is larger than {} MiB", MAX_FILE_BYTES >> 20));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use redeliver_testkit::scratch::Scratch;

    use super::*;

    /// Two files with a number each. The pair is usable if both are equal.
    struct Pair {
        scratch: Scratch,
        files: WatchedFiles<u32>,
        stale: Gauge,
        parsed: Arc<AtomicUsize>,
    }

    fn pair_in(files: &[FileContents<'_>]) -> Result<u32, InvalidField> {
        let mut numbers = Vec::new();
        for file in files {
            let number = std::str::from_utf8(file.bytes)
                .ok()
                .and_then(|text| text.parse().ok());
            numbers.push(number.ok_or_else(|| file.problem("is not a number"))?);
        }
        match numbers[..] {
            [first, second] if first == second => Ok(first),
            _ => Err(files[1].problem("is another number")),
        }
    }

    impl Pair {
        fn at(scratch: Scratch, directory: &str) -> Result<Self, InvalidField> {
            let file = |name: &str| ConfiguredFile {
                field: format!("x.{name}"),
                path: scratch.path().join(directory).join(name),
            };
            let parsed = Arc::new(AtomicUsize::new(0));
            let files = WatchedFiles::load(vec![file("first"), file("second")], {
                let parsed = parsed.clone();
                move |files| {
                    parsed.fetch_add(1, Ordering::Relaxed);
                    pair_in(files)
                }
            })?;
            let stale = Gauge::default();
            files.observe(stale.clone());
            Ok(Self {
                scratch,
                files,
                stale,
                parsed,
            })
        }

        fn new() -> Self {
            let scratch = Scratch::new("watched-files").unwrap();
            for name in ["first", "second"] {
                std::fs::write(scratch.path().join(name), "1").unwrap();
            }
            Self::at(scratch, "").unwrap()
        }

        fn write(&self, name: &str, text: &str) {
            std::fs::write(self.scratch.path().join(name), text).unwrap();
        }

        /// Whether the check changes the value, the value, and the gauge.
        fn check(&self) -> (bool, u32, i64) {
            (self.files.check(), *self.files.value(), self.stale.get())
        }
    }

    #[test]
    fn change_needs_two_equal_reads() {
        let pair = Pair::new();
        assert_eq!(pair.check(), (false, 1, 0));
        pair.write("first", "2");
        // Only one of the two files is replaced yet.
        assert_eq!(pair.check(), (false, 1, 0));
        pair.write("second", "2");
        assert_eq!(pair.check(), (false, 1, 0));
        assert_eq!(pair.check(), (true, 2, 0));
        assert_eq!(pair.check(), (false, 2, 0));
        // A change that is taken back.
        pair.write("first", "3");
        assert_eq!(pair.check(), (false, 2, 0));
        pair.write("first", "2");
        assert_eq!(pair.check(), (false, 2, 0));
    }

    #[test]
    fn expected_change_is_used_at_once() {
        let pair = Pair::new();
        assert!(!pair.files.check_now());
        pair.write("first", "2");
        pair.write("second", "2");
        assert!(pair.files.check_now());
        assert_eq!(pair.check(), (false, 2, 0));
        // The first of the two reads was that of an ordinary check.
        pair.write("first", "3");
        pair.write("second", "3");
        assert_eq!(pair.check(), (false, 2, 0));
        assert!(pair.files.check_now());
        assert_eq!(pair.check(), (false, 3, 0));
        let parsed = pair.parsed.load(Ordering::Relaxed);
        pair.write("first", "x");
        for _ in 0..2 {
            assert!(!pair.files.check_now());
            assert_eq!((*pair.files.value(), pair.stale.get()), (3, 1));
        }
        assert_eq!(pair.parsed.load(Ordering::Relaxed), parsed + 1);
    }

    #[test]
    fn unusable_files_keep_previous_value() {
        let pair = Pair::new();
        pair.write("second", "x");
        assert_eq!(pair.check(), (false, 1, 0));
        assert_eq!(pair.check(), (false, 1, 1));
        // They are parsed, and so reported, once.
        let parsed = pair.parsed.load(Ordering::Relaxed);
        assert_eq!(pair.check(), (false, 1, 1));
        assert_eq!(pair.parsed.load(Ordering::Relaxed), parsed);
        std::fs::remove_file(pair.scratch.path().join("second")).unwrap();
        for _ in 0..2 {
            assert_eq!(pair.check(), (false, 1, 1));
        }
        pair.write("second", "1");
        assert_eq!(pair.check(), (false, 1, 0));
        std::fs::remove_file(pair.scratch.path().join("first")).unwrap();
        assert_eq!(pair.check(), (false, 1, 0));
        assert_eq!(pair.check(), (false, 1, 1));
        for name in ["first", "second"] {
            pair.write(name, "3");
        }
        assert_eq!(pair.check(), (false, 1, 1));
        assert_eq!(pair.check(), (true, 3, 0));
    }
}
