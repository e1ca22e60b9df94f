//! Files of a table that are replaced by others: by one with the same rows, or with fewer.

use std::collections::BTreeSet;

use delta_kernel::arrow::array::{Array as _, AsArray as _, RecordBatch};
use delta_kernel::arrow::compute::concat_batches;
use delta_kernel::committer::FileSystemCommitter;
use delta_kernel::engine::arrow_data::{ArrowEngineData, EngineDataArrowExt};
use delta_kernel::engine_data::FilteredEngineData;
use delta_kernel::expressions::Scalar;
use delta_kernel::schema::PrimitiveType;
use delta_kernel::transaction::{CommitResult, UpdateTableOperation};
use delta_kernel::{Engine as _, FileMeta, KernelError, KernelResult, SnapshotRef};
use delta_kernel_default_engine::build_add_file_metadata;
use delta_kernel_default_engine::parquet::DataFileMetadata;
use redeliver_core::{Clock as _, SystemClock, mutant};
use redeliver_kafka::fault;
use url::Url;

use super::{DeltaTable, ENGINE, File, TableError};
use crate::appender::Table as _;
use crate::schema::DAY;

/// How often a commit is tried again because somebody else was first.
const ATTEMPTS: u32 = 20;

/// A file of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LiveFile {
    pub(crate) meta: FileMeta,
    pub(crate) rows: u64,
    /// In days since 1970; `None` in a file of another engine.
    pub(crate) day: Option<i32>,
}

/// The files of a snapshot, and what the log says about them.
#[derive(Default)]
pub(crate) struct Live {
    pub(crate) files: Vec<LiveFile>,
    /// Whether another engine has deleted rows of a file without replacing it.
    has_vectors: bool,
    log: Vec<(RecordBatch, Vec<bool>)>,
}

impl Live {
    fn has(&self, location: &Url) -> bool {
        self.files.iter().any(|file| file.meta.location == *location)
    }
}

/// What replaces files.
pub(crate) enum Replacement<'f> {
    /// A file with the same rows.
    Same(&'f File),
    /// A file with those of the rows that are left, or none.
    Fewer(Option<&'f File>),
}

impl Replacement<'_> {
    fn file(&self) -> Option<&File> {
        match self {
            Self::Same(file) => Some(file),
            Self::Fewer(file) => *file,
        }
    }
}

impl DeltaTable {
    /// The files of a snapshot, which can be read and replaced. Blocks.
    ///
    /// # Errors
    /// If the log cannot be read, or the table is unsuitable.
    pub(crate) fn live(&self, snapshot: &SnapshotRef) -> Result<Live, TableError> {
        self.check(snapshot)?;
        let live = self.listed(snapshot)?;
        if live.has_vectors {
            // Their rows would come back.
            let problem = "has deletion vectors; remove them, for example with REORG TABLE ... APPLY (PURGE)";
            return Err(self.unsuitable(&problem));
        }
        Ok(live)
    }

    /// The files of a snapshot. Blocks.
    ///
    /// # Errors
    /// If the log cannot be read.
    pub(super) fn listed(&self, snapshot: &SnapshotRef) -> Result<Live, TableError> {
        let read = || -> KernelResult<Live> {
            let scan = snapshot.clone().scan_builder().build()?;
            let mut live = Live::default();
            for found in scan.scan_metadata(&*self.engine)? {
                let found = found?;
                for file in found.visit_scan_files(Vec::new(), Vec::push)? {
                    live.has_vectors |= file.dv_info.has_vector();
                    let day = file.partition_values.get(DAY).map_or("", String::as_str);
                    let day = match PrimitiveType::Date.parse_scalar(day)? {
                        Scalar::Date(day) => Some(day),
                        _ => None,
                    };
                    let size = u64::try_from(file.size).unwrap_or(0);
                    live.files.push(LiveFile {
                        meta: FileMeta::new(self.root.join(&file.path)?, file.modification_time, size),
                        rows: file.stats.map_or(0, |stats| stats.num_records),
                        day,
                    });
                }
                let (data, selected) = found.scan_files.into_parts();
                live.log.push((data.try_into_record_batch()?, selected));
            }
            Ok(live)
        };
        read().map_err(self.failed("reading the log"))
    }

    /// The rows of a file, without the day. Blocks.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(crate) fn rows(
        &self,
        snapshot: &SnapshotRef,
        file: &LiveFile,
    ) -> Result<Vec<RecordBatch>, TableError> {
        let read = || -> KernelResult<Vec<RecordBatch>> {
            let schema = snapshot.schema();
            let names: Vec<&str> = schema
                .field_names()
                .map(String::as_str)
                .filter(|name| *name != DAY)
                .collect();
            let handler = self.engine.parquet_handler();
            let read = handler.read_parquet_files(
                std::slice::from_ref(&file.meta),
                schema.project(&names)?,
                None,
            )?;
            read.map(EngineDataArrowExt::try_into_record_batch).collect()
        };
        read().map_err(self.failed("reading a file"))
    }

    /// Writes rows of a day to a file. Blocks.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn write_rows(
        &self,
        snapshot: &SnapshotRef,
        rows: &[RecordBatch],
        day: Option<i32>,
    ) -> Result<Option<File>, TableError> {
        let Some(first) = rows.first() else {
            return Ok(None);
        };
        let write = || -> KernelResult<File> {
            let rows = concat_batches(&first.schema(), rows)?;
            self.write_file(snapshot, &rows, day, SystemClock.now())
        };
        write().map(Some).map_err(self.failed("writing a file"))
    }

    /// Replaces files, if all of them are still in the table. `false`: they are not, or somebody else was faster too often. Blocks.
    ///
    /// # Errors
    /// If the table cannot be read or written.
    pub(crate) fn replace(
        &self,
        snapshot: &SnapshotRef,
        removed: &BTreeSet<Url>,
        replacement: &Replacement<'_>,
    ) -> Result<bool, TableError> {
        let mut snapshot = snapshot.clone();
        let mut failed = None;
        for _ in 0..ATTEMPTS {
            let live = self.live(&snapshot)?;
            // An earlier attempt, whose outcome was unknown. Without a file, it is the most likely cause.
            let is_replaced = match replacement.file() {
                Some(file) => live.has(&file.meta.location),
                None => failed.is_some() && !removed.iter().any(|location| live.has(location)),
            };
            if is_replaced {
                return Ok(true);
            }
            if !removed.iter().all(|location| live.has(location))
                && !mutant!("lake-replaces-files-that-are-gone")
            {
                return Ok(false);
            }
            if let Some(error) = failed.take() {
                return Err(error);
            }
            // After a standstill of the process, it may have been deleted as one that nobody will commit.
            if replacement.file().is_some_and(|file| self.is_abandoned(file)) {
                return Ok(false);
            }
            fault::point("lake_before_replace");
            match self.try_replace(&snapshot, &live, removed, replacement) {
                Ok(CommitResult::Committed(_)) => {
                    fault::point("lake_after_replace");
                    return Ok(true);
                }
                Ok(CommitResult::Conflicted(_)) => {}
                Ok(CommitResult::Retryable(retryable)) => {
                    failed = Some(self.failed("replacing files")(retryable.error));
                }
                Err(error) => failed = Some(self.failed("replacing files")(error)),
            }
            snapshot = self.refresh(&snapshot)?;
        }
        Ok(false)
    }

    fn try_replace(
        &self,
        snapshot: &SnapshotRef,
        live: &Live,
        removed: &BTreeSet<Url>,
        replacement: &Replacement<'_>,
    ) -> KernelResult<CommitResult> {
        let (operation, changes_data) = match replacement {
            Replacement::Same(_) => (UpdateTableOperation::Optimize, false),
            Replacement::Fewer(_) => (UpdateTableOperation::Delete, true),
        };
        let mut transaction = snapshot
            .clone()
            .update_table(operation, ENGINE, changes_data)
            .build(&*self.engine, Box::new(FileSystemCommitter::new()))?;
        if let Some(file) = replacement.file() {
            let written = DataFileMetadata::new(file.meta.clone(), file.statistics.clone());
            transaction.add_files(build_add_file_metadata(written, &file.context)?);
        }
        let mut count = 0;
        for (rows, selected) in &live.log {
            let Some(paths) = rows
                .column_by_name("path")
                .and_then(|paths| paths.as_string_opt::<i32>())
            else {
                continue;
            };
            let mut is_removed = Vec::with_capacity(rows.num_rows());
            for row in 0..rows.num_rows() {
                let is_live = selected.get(row).copied().unwrap_or(true) && paths.is_valid(row);
                is_removed.push(is_live && removed.contains(&self.root.join(paths.value(row))?));
            }
            count += is_removed.iter().filter(|is_removed| **is_removed).count();
            if is_removed.contains(&true) {
                let data = Box::new(ArrowEngineData::new(rows.clone()));
                transaction.remove_files(FilteredEngineData::try_new(data, is_removed)?);
            }
        }
        // Otherwise, the rows of a file that stays would be there twice.
        if count != removed.len() {
            return Err(KernelError::generic(
                "the log has no rows for some of the files to remove",
            ));
        }
        transaction.commit(&*self.engine)
    }
}
