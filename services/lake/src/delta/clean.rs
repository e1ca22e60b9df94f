//! Objects of a table that no reader needs any more.

use std::collections::BTreeSet;

use delta_kernel::{Engine as _, FileMeta, KernelResult, Snapshot, SnapshotRef, Version};
use redeliver_core::Timestamp;
use url::Url;

use super::{DeltaTable, LONGEST_APPEND, TableError};
use crate::schema::DAY;

/// What the name of a checkpoint ends with.
const CHECKPOINT: &str = "checkpoint.parquet";

/// An object of the log.
struct Entry {
    version: Version,
    /// What follows the version in its name.
    kind: String,
    meta: FileMeta,
}

impl DeltaTable {
    /// Objects of which no snapshot from `before` on consists, and that no process will commit: data files that were replaced or never committed, and
    /// log entries before a checkpoint. Blocks.
    ///
    /// # Errors
    /// If the table cannot be read.
    pub(crate) fn unneeded(&self, snapshot: &SnapshotRef, before: Timestamp) -> Result<Vec<Url>, TableError> {
        let list = || -> KernelResult<(Vec<Entry>, Vec<FileMeta>)> {
            let (mut log, mut files) = (Vec::new(), Vec::new());
            for meta in self.engine.storage_handler().list_from(&self.root)? {
                let meta = meta?;
                match path_end(&meta.location) {
                    (Some("_delta_log"), name) => log.extend(entry(name, &meta)),
                    // Also those that other engines have written, because a purge may have replaced them.
                    (Some(directory), name) if is_data(directory, name) => files.push(meta),
                    _ => {}
                }
            }
            Ok((log, files))
        };
        let (log, files) = list().map_err(self.failed("listing files"))?;
        let before_ms = before.as_millis();
        let is_old = |entry: &&Entry| entry.meta.last_modified <= before_ms;
        // The snapshot at that time, and all later ones, need no other files than these two and files that were committed since.
        let commits = log.iter().filter(|entry| entry.kind == "json");
        let Some(oldest) = commits.filter(is_old).map(|entry| entry.version).max() else {
            return Ok(Vec::new());
        };
        let then = Snapshot::builder_for(self.root.as_str())
            .at_version(oldest)
            .build(&*self.engine)
            .map_err(self.failed("reading an earlier snapshot"))?;
        let mut needed = BTreeSet::new();
        for snapshot in [&then, snapshot] {
            let files = self.listed(snapshot)?.files;
            // By their names, which are unique: a path can be encoded in several ways.
            needed.extend(
                files
                    .iter()
                    .map(|file| path_end(&file.meta.location).1.to_owned()),
            );
        }
        let written_before = before_ms - i64::try_from(LONGEST_APPEND.as_millis()).unwrap_or(i64::MAX);
        let files = files
            .into_iter()
            .filter(|file| file.last_modified < written_before)
            .filter(|file| !needed.contains(path_end(&file.location).1));
        let mut unneeded: Vec<Url> = files.map(|file| file.location).collect();
        let checkpoints = log.iter().filter(|entry| entry.kind == CHECKPOINT);
        if let Some(first) = checkpoints.filter(is_old).map(|entry| entry.version).max() {
            let earlier = log.into_iter().filter(|entry| entry.version < first);
            unneeded.extend(earlier.map(|entry| entry.meta.location));
        }
        Ok(unneeded)
    }

    /// The version of the newest checkpoint.
    pub(super) fn last_checkpoint(&self) -> KernelResult<Option<Version>> {
        let log = self.root.join("_delta_log/")?;
        let mut last = None;
        for meta in self.engine.storage_handler().list_from(&log)? {
            let meta = meta?;
            let entry = entry(path_end(&meta.location).1, &meta);
            let checkpoint = entry.filter(|entry| entry.kind == CHECKPOINT);
            last = last.max(checkpoint.map(|entry| entry.version));
        }
        Ok(last)
    }

    /// Deletes an object. Blocks.
    ///
    /// # Errors
    /// If the store does not.
    pub(crate) fn delete(&self, object: &Url) -> Result<(), TableError> {
        let deleted = self.engine.storage_handler().delete(object);
        deleted.map_err(self.failed("deleting a file"))
    }
}

/// The last directory and the name of an object.
fn path_end(location: &Url) -> (Option<&str>, &str) {
    let mut segments = location.path().rsplit('/');
    let name = segments.next().unwrap_or_default();
    (segments.next(), name)
}

/// Whether it is a file with rows of a day.
fn is_data(directory: &str, name: &str) -> bool {
    directory.starts_with(DAY) && name.ends_with(".parquet")
}

/// An entry of the log, by its name; `None`: something else.
fn entry(name: &str, meta: &FileMeta) -> Option<Entry> {
    let (version, kind) = name.split_once('.')?;
    (version.len() == 20).then_some(())?;
    Some(Entry {
        version: version.parse().ok()?,
        kind: kind.to_owned(),
        meta: meta.clone(),
    })
}
