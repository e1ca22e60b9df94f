//! What keeps the number of objects bounded: small files are merged, and what no reader needs any more is deleted.
//!
//! It needs no lock: a commit that replaces files succeeds only while all of them are in the table, and files are deleted only after
//! [`LakeConfig::keep_replaced`].

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use delta_kernel::SnapshotRef;
use delta_kernel::arrow::array::{AsArray as _, BooleanArray, RecordBatch, StringArray};
use delta_kernel::arrow::compute::kernels::cmp::eq;
use delta_kernel::arrow::compute::{and, cast, filter_record_batch};
use delta_kernel::arrow::datatypes::DataType;
use delta_kernel::arrow::error::ArrowError;
use redeliver_core::error_chain::error_chain;
use redeliver_core::{Clock, SystemClock, Timestamp};
use redeliver_runtime::cli::{CommonArgs, report};
use redeliver_runtime::config::ProgramConfig;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use url::Url;

use crate::appender::Table as _;
use crate::config::{LakeConfig, Sections};
use crate::delta::rewrite::{LiveFile, Replacement};
use crate::delta::{DeltaTable, MILLIS_PER_DAY, Store, TableError};
use crate::ingest::is_stopped_within;
use crate::metrics::Metrics;
use crate::schema::{Kind, Schema, TABLES};
use crate::service::location;

/// A file with fewer rows and bytes than these is merged with others.
const SMALL: (u64, u64) = (100_000, 4 << 20);
/// So many small files of the current day are merged. Those of earlier days are merged as soon as there are two.
const SMALL_FILES: usize = 60;
/// Maximum size of the rows that a merge holds in memory, in bytes, without the last file.
const MERGED_BYTES: usize = 32 << 20;
/// Between a start and the first look, so that a process that restarts often does it, too.
const FIRST: Duration = Duration::from_secs(60);

/// What was done to a table, or would be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Done {
    /// Files before.
    files: usize,
    /// Files that were merged, and into how many.
    merged: (usize, usize),
    deleted: usize,
}

/// The thread that maintains the tables.
pub(crate) struct Maintenance {
    pub(crate) store: Store,
    pub(crate) lake: LakeConfig,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) metrics: Metrics,
    pub(crate) stop: CancellationToken,
}

impl Maintenance {
    /// Runs until `stop` is cancelled.
    pub(crate) fn run(&self) {
        let interval = self.lake.maintenance_interval.duration();
        let mut wait = interval.min(FIRST);
        let mut large = BTreeSet::new();
        while !is_stopped_within(&self.stop, wait) {
            wait = interval;
            for schema in TABLES {
                let work = Work {
                    lake: &self.lake,
                    now: self.clock.now(),
                    is_dry_run: false,
                    stop: &self.stop,
                };
                match work.maintain(&self.store, schema, &mut large) {
                    Ok(done) => {
                        self.metrics.maintained(schema.table, done.files);
                        if done.merged.0 + done.deleted > 0 {
                            tracing::info!(
                                table = schema.table,
                                merged = done.merged.0,
                                into = done.merged.1,
                                deleted = done.deleted,
                                "maintained table"
                            );
                        }
                    }
                    Err(error) => {
                        self.metrics.maintenance_failed(schema.table);
                        let error = error_chain(&error);
                        tracing::warn!(
                            table = schema.table,
                            error,
                            "cannot maintain table; trying again later"
                        );
                    }
                }
                if self.stop.is_cancelled() {
                    return;
                }
            }
        }
    }
}

/// How tables are maintained.
struct Work<'w> {
    lake: &'w LakeConfig,
    now: Timestamp,
    is_dry_run: bool,
    stop: &'w CancellationToken,
}

impl Work<'_> {
    /// Merges files of a table, and deletes what is not needed. Blocks. `large`: see [`merge`].
    fn maintain(
        &self,
        store: &Store,
        schema: &'static Schema,
        large: &mut BTreeSet<Url>,
    ) -> Result<Done, TableError> {
        let (table, mut snapshot) = store.open_existing(schema)?;
        let mut files = table.live(&snapshot)?.files;
        let mut done = Done {
            files: files.len(),
            ..Done::default()
        };
        files.retain(|file| !large.contains(&file.meta.location));
        let today = self.now.as_millis().div_euclid(MILLIS_PER_DAY);
        for group in groups(&files, i32::try_from(today).unwrap_or(i32::MAX)) {
            if self.stop.is_cancelled() {
                return Ok(done);
            }
            let merged = match self.is_dry_run {
                true => group.len(),
                false => merge(&table, &snapshot, &group, MERGED_BYTES, large)?,
            };
            if merged > 0 {
                done.merged = (done.merged.0 + merged, done.merged.1 + 1);
                snapshot = table.refresh(&snapshot)?;
            }
        }
        if !self.is_dry_run {
            snapshot = table.checkpoint_if_missed(snapshot)?;
        }
        let kept = i64::try_from(self.lake.keep_replaced.as_millis()).unwrap_or(i64::MAX);
        let before = Timestamp::from_millis(self.now.as_millis().saturating_sub(kept));
        for object in table.unneeded(&snapshot, before)? {
            if self.stop.is_cancelled() {
                break;
            }
            if !self.is_dry_run {
                table.delete(&object)?;
            }
            done.deleted += 1;
        }
        Ok(done)
    }
}

/// Which files are merged with each other: those of a day, in the order in which they were written, until a file is not small any more.
fn groups(files: &[LiveFile], today: i32) -> Vec<Vec<&LiveFile>> {
    let mut days: BTreeMap<i32, Vec<&LiveFile>> = BTreeMap::new();
    for file in files {
        if let Some(day) = file.day
            && file.rows < SMALL.0
            && file.meta.size < SMALL.1
        {
            days.entry(day).or_default().push(file);
        }
    }
    let mut groups = Vec::new();
    for (day, mut small) in days {
        if day >= today && small.len() < SMALL_FILES {
            continue;
        }
        small.sort_by_key(|file| file.meta.last_modified);
        let (mut group, mut rows, mut bytes) = (Vec::new(), 0, 0);
        for file in small {
            group.push(file);
            rows += file.rows;
            bytes += file.meta.size;
            if rows >= SMALL.0 || bytes >= SMALL.1 {
                groups.push(std::mem::take(&mut group));
                (rows, bytes) = (0, 0);
            }
        }
        groups.push(group);
    }
    groups.retain(|group| group.len() > 1);
    groups
}

/// Merges files, or the first of them if all are too large for memory, and returns how many. 0: not now. Files with rows of `limit` bytes in memory, which are
/// small only because they are compressed, stay as they are, and are added to `large`, so that they are not read each time.
fn merge(
    table: &DeltaTable,
    snapshot: &SnapshotRef,
    group: &[&LiveFile],
    limit: usize,
    large: &mut BTreeSet<Url>,
) -> Result<usize, TableError> {
    let (mut rows, mut bytes, mut merged) = (Vec::new(), 0, BTreeSet::new());
    for file in group {
        let read = table.rows(snapshot, file)?;
        let size = read.iter().map(RecordBatch::get_array_memory_size).sum::<usize>();
        if size >= limit {
            large.insert(file.meta.location.clone());
            continue;
        }
        bytes += size;
        rows.extend(read);
        merged.insert(file.meta.location.clone());
        if bytes >= limit {
            break;
        }
    }
    let day = group.first().and_then(|file| file.day);
    if merged.len() < 2 {
        return Ok(0);
    }
    let Some(file) = table.write_rows(snapshot, &rows, day)? else {
        return Ok(0);
    };
    let is_merged = table.replace(snapshot, &merged, &Replacement::Same(&file))?;
    Ok(if is_merged { merged.len() } else { 0 })
}

/// The rows that have this text in each of these columns.
struct Condition(Vec<(String, String)>);

impl Condition {
    /// The rows that do not match, and how many do.
    fn without(&self, rows: &RecordBatch) -> Result<(RecordBatch, usize), ArrowError> {
        let mut matching = BooleanArray::from(vec![true; rows.num_rows()]);
        for (name, value) in &self.0 {
            let Some(column) = rows.column_by_name(name) else {
                return Ok((rows.clone(), 0));
            };
            let texts = cast(column, &DataType::Utf8)?;
            let value = StringArray::new_scalar(value);
            matching = and(&matching, &eq(&texts.as_string::<i32>(), &value)?)?;
        }
        // Null is no match.
        let others: BooleanArray = matching
            .iter()
            .map(|is_match| Some(is_match != Some(true)))
            .collect();
        let left = filter_record_batch(rows, &others)?;
        let matches = rows.num_rows() - left.num_rows();
        Ok((left, matches))
    }

    fn is_of(&self, schema: &Schema) -> bool {
        self.0.iter().all(|(name, _)| {
            let mut columns = schema.columns.iter();
            columns.any(|column| column.name == name && column.kind != Kind::Time)
        })
    }
}

/// Removes rows from a table until its newest snapshot has none of them, and returns how many. Blocks.
fn purge(
    table: &DeltaTable,
    mut snapshot: SnapshotRef,
    condition: &Condition,
    is_dry_run: bool,
) -> Result<usize, TableError> {
    let (mut purged, mut others) = (0, BTreeSet::new());
    loop {
        for file in table.live(&snapshot)?.files {
            if others.contains(&file.meta.location) {
                continue;
            }
            let (mut left, mut matches) = (Vec::new(), 0);
            for rows in table.rows(&snapshot, &file)? {
                let (others, matching) = condition
                    .without(&rows)
                    .map_err(|error| table.unsuitable(&error))?;
                matches += matching;
                if others.num_rows() > 0 {
                    left.push(others);
                }
            }
            if matches == 0 {
                others.insert(file.meta.location);
                continue;
            }
            if !is_dry_run {
                let replacement = table.write_rows(&snapshot, &left, file.day)?;
                let removed = BTreeSet::from([file.meta.location]);
                let replacement = Replacement::Fewer(replacement.as_ref());
                let is_replaced = table.replace(&snapshot, &removed, &replacement)?;
                if !is_replaced {
                    // It was merged with others.
                    break;
                }
            }
            purged += matches;
        }
        let newest = table.refresh(&snapshot)?;
        if is_dry_run || newest.version() == snapshot.version() {
            return Ok(purged);
        }
        snapshot = newest;
    }
}

fn open(args: &CommonArgs) -> anyhow::Result<(LakeConfig, Runtime, Store)> {
    let config: ProgramConfig<Sections> = args.load()?;
    let runtime = Runtime::new()?;
    let store = Store::new(location(&config.own)?, runtime.handle().clone())?;
    Ok((config.own.lake, runtime, store))
}

/// Maintains all tables once.
pub fn maintain_tables(args: &CommonArgs, is_dry_run: bool) -> ExitCode {
    let run = || -> anyhow::Result<ExitCode> {
        let (lake, _runtime, store) = open(args)?;
        println!(
            "{:<14}{:>10}{:>10}{:>10}{:>10}",
            "TABLE", "FILES", "MERGED", "INTO", "DELETED"
        );
        let work = Work {
            lake: &lake,
            now: SystemClock.now(),
            is_dry_run,
            stop: &CancellationToken::new(),
        };
        Ok(of_each(TABLES, |schema| {
            let done = work.maintain(&store, schema, &mut BTreeSet::new())?;
            println!(
                "{:<14}{:>10}{:>10}{:>10}{:>10}",
                schema.table, done.files, done.merged.0, done.merged.1, done.deleted
            );
            Ok(())
        }))
    };
    end(run())
}

/// Removes the rows that have each of these values, from all tables with these columns.
pub fn purge_rows(args: &CommonArgs, conditions: &[(String, String)], is_dry_run: bool) -> ExitCode {
    let condition = Condition(conditions.to_vec());
    let run = || -> anyhow::Result<ExitCode> {
        let (_, _runtime, store) = open(args)?;
        let tables: Vec<&'static Schema> = TABLES
            .into_iter()
            .filter(|schema| condition.is_of(schema))
            .collect();
        anyhow::ensure!(!tables.is_empty(), "no table has these columns, or one is a time");
        println!("{:<14}{:>14}", "TABLE", "PURGED ROWS");
        let code = of_each(tables, |schema| {
            let (table, snapshot) = store.open_existing(schema)?;
            let purged = purge(&table, snapshot, &condition, is_dry_run)?;
            println!("{:<14}{purged:>14}", schema.table);
            Ok(())
        });
        println!(
            "Rows that the service has read but not committed yet are not among them: repeat until there are none."
        );
        Ok(code)
    };
    end(run())
}

/// Does something with each table, also after it has failed for one of them. Prints errors, and returns the exit code of the last one.
fn of_each(
    tables: impl IntoIterator<Item = &'static Schema>,
    step: impl Fn(&'static Schema) -> Result<(), TableError>,
) -> ExitCode {
    let errors = tables.into_iter().filter_map(|schema| step(schema).err());
    let codes = errors.map(|error| report(&error));
    codes.last().unwrap_or(ExitCode::SUCCESS)
}

fn end(result: anyhow::Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| report(&*error))
}

#[cfg(test)]
mod tests;
