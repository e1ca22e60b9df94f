//! Tables on a local path or in an object store, with `delta_kernel`.
//!
//! No table uses deletion vectors, column mapping or other features that readers need, so that every engine reads it.

mod clean;
pub(crate) mod rewrite;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use delta_kernel::arrow::array::{RecordBatch, StructArray};
use delta_kernel::committer::FileSystemCommitter;
use delta_kernel::engine::arrow_data::EngineDataArrowExt as _;
use delta_kernel::expressions::Scalar;
use delta_kernel::object_store::DynObjectStore;
use delta_kernel::parquet::arrow::ArrowWriter;
use delta_kernel::parquet::arrow::arrow_writer::ArrowWriterOptions;
use delta_kernel::parquet::basic::{Compression, ZstdLevel};
use delta_kernel::parquet::file::properties::WriterProperties;
use delta_kernel::schema::{DataType, StructField, StructType};
use delta_kernel::snapshot::IncrementalReplay;
use delta_kernel::table_features::ColumnMappingMode;
use delta_kernel::transaction::create_table::create_table;
use delta_kernel::transaction::data_layout::DataLayout;
use delta_kernel::transaction::{
    BoundWriteContext, CommitResult, UpdateTableOperation, UpdateTableTransactionBuilder,
};
use delta_kernel::{Engine as _, FileMeta, KernelError, KernelResult, Snapshot, SnapshotRef};
use delta_kernel_default_engine::executor::tokio::TokioMultiThreadExecutor;
use delta_kernel_default_engine::parquet::DataFileMetadata;
use delta_kernel_default_engine::stats::collect_stats;
use delta_kernel_default_engine::storage::store_from_url_opts;
use delta_kernel_default_engine::{DefaultEngine, DefaultEngineBuilder, build_add_file_metadata};
use redeliver_core::error_chain::error_chain;
use redeliver_core::{Clock as _, SystemClock, Timestamp};
use tokio::runtime::Handle;
use url::Url;

use crate::appender::{Commit, Move, Table};
use crate::schema::{DAY, Kind, Schema, TABLES, WITH_STATISTICS};

/// What the history of a table says about who has written it.
const ENGINE: &str = concat!("redeliver-lake/", env!("CARGO_PKG_VERSION"));
/// A checkpoint follows this many commits, so that a reader reads at most this many entries of the log.
const CHECKPOINT_EVERY: u64 = 100;
/// How long a file may be written before its commit, at most. Files that no commit names are deleted later, see `clean`.
const LONGEST_APPEND: Duration = Duration::from_secs(3_600);
/// Properties of a table that forget positions, which would be read again from the beginning.
const FORGETS: &str = "delta.setTransactionRetentionDuration";
pub(crate) const MILLIS_PER_DAY: i64 = 86_400_000;
/// Prefixes of environment variables that configure object stores.
const STORE_VARIABLES: [&str; 3] = ["AWS_", "AZURE_", "GOOGLE_"];

/// The directory of the tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Location(Url);

/// Why a table cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TableError {
    /// It cannot be read or written.
    #[error("{step} of table `{table}`")]
    Failed {
        /// The name of the table.
        table: &'static str,
        /// The operation.
        step: &'static str,
        /// The cause.
        source: Box<KernelError>,
    },
    /// It must not be used.
    #[error("table `{table}` {problem}")]
    Unsuitable {
        /// The name of the table.
        table: &'static str,
        /// Why.
        problem: String,
    },
    /// The object store cannot be used.
    #[error("{problem}")]
    Store {
        /// Why.
        problem: &'static str,
        /// The cause.
        source: Option<Box<KernelError>>,
    },
}

type Engine = DefaultEngine<TokioMultiThreadExecutor>;

impl Location {
    /// An absolute path, or a URL.
    ///
    /// # Errors
    /// Why it is neither.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        if text.starts_with('/') {
            let url = Url::from_directory_path(text);
            return url.map(Self).map_err(|()| format!("`{text}` is not a path"));
        }
        let with_slash = format!("{}/", text.trim_end_matches('/'));
        let url = Url::parse(&with_slash).map_err(|error| format!("`{text}` is not a URL: {error}"))?;
        Ok(Self(url))
    }

    fn of_table(&self, table: &str) -> Url {
        // The name of a table is a valid part of a path.
        let url = self.0.join(&format!("{table}/"));
        url.unwrap_or_else(|_| self.0.clone())
    }

    fn store(&self) -> KernelResult<Arc<DynObjectStore>> {
        let of_stores = |name: &String| STORE_VARIABLES.iter().any(|prefix| name.starts_with(prefix));
        // Others may not be UTF-8.
        let variables = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .filter(|(name, _)| of_stores(name));
        store_from_url_opts(
            &self.0,
            variables.map(|(name, value)| (name.to_lowercase(), value)),
        )
    }
}

/// The object store with all tables.
#[derive(Clone)]
pub(crate) struct Store {
    location: Location,
    engine: Arc<Engine>,
}

impl Store {
    /// A store whose requests run on this runtime, which must have several threads.
    ///
    /// # Errors
    /// If the location is of no known store, or its configuration is incomplete.
    pub(crate) fn new(location: Location, runtime: Handle) -> Result<Self, TableError> {
        let store = location.store().map_err(|source| TableError::Store {
            problem: "lake.location cannot be used",
            source: Some(Box::new(source)),
        })?;
        let executor = Arc::new(TokioMultiThreadExecutor::new(runtime));
        let engine = DefaultEngineBuilder::new(store)
            .with_task_executor(executor)
            .build();
        Ok(Self {
            location,
            engine: Arc::new(engine),
        })
    }

    /// Checks that an object is not replaced if it must not be: otherwise, two writers could commit the same entry of a log. Blocks.
    ///
    /// # Errors
    /// If it is replaced, or the store does not answer.
    pub(crate) fn probe(&self) -> Result<(), TableError> {
        let storage = self.engine.storage_handler();
        let failed = |source| TableError::Store {
            problem: "cannot write to lake.location",
            source: Some(Box::new(source)),
        };
        let url = self
            .location
            .of_table("_probe")
            .join(&format!("{:032x}", fastrand::u128(..)));
        let url = url.map_err(|error| failed(error.into()))?;
        storage
            .put(&url, Bytes::from_static(b"1"), false)
            .map_err(failed)?;
        let again = storage.put(&url, Bytes::from_static(b"2"), false);
        let removed = storage.delete(&url);
        match again {
            Err(KernelError::FileAlreadyExists(_)) => removed.map_err(failed),
            Err(error) => Err(failed(error)),
            Ok(()) => Err(TableError::Store {
                problem: "the store of lake.location ignores If-None-Match, so that writers could overwrite each other; use another one",
                source: None,
            }),
        }
    }

    /// Opens a table, which is created if it is missing, and gets the columns that it lacks. Blocks.
    ///
    /// # Errors
    /// If the store does not answer, or the table is unsuitable.
    pub(crate) fn open(&self, schema: &'static Schema) -> Result<(DeltaTable, SnapshotRef), TableError> {
        let table = self.table(schema);
        let mut snapshot = match table.exists().map_err(table.failed("listing files"))? {
            true => table.newest().map_err(table.failed("opening"))?,
            false => table.create().map_err(table.failed("creating"))?,
        };
        loop {
            let lacking = table.lacking(&snapshot)?;
            if lacking.is_empty() {
                break;
            }
            snapshot = table
                .add_columns(&snapshot, lacking)
                .map_err(table.failed("adding columns"))?;
        }
        Ok((table, snapshot))
    }

    /// Opens a table as it is, and writes nothing. Blocks.
    ///
    /// # Errors
    /// If the table is missing or cannot be read.
    pub(crate) fn open_existing(
        &self,
        schema: &'static Schema,
    ) -> Result<(DeltaTable, SnapshotRef), TableError> {
        let table = self.table(schema);
        let snapshot = table.load().map_err(table.failed("opening"))?;
        Ok((table, snapshot))
    }

    fn table(&self, schema: &'static Schema) -> DeltaTable {
        DeltaTable {
            root: self.location.of_table(schema.table),
            schema,
            engine: self.engine.clone(),
        }
    }
}

/// All rows of a table, for tests. Blocks.
///
/// # Errors
/// If the location or the table cannot be read, or there is no such table.
pub fn read(location: &str, table: &str, runtime: &Handle) -> anyhow::Result<Vec<RecordBatch>> {
    let location = Location::parse(location).map_err(anyhow::Error::msg)?;
    let mut schemas = TABLES.into_iter();
    let schema = schemas
        .find(|schema| schema.table == table)
        .context("no such table")?;
    let (table, snapshot) = Store::new(location, runtime.clone())?.open_existing(schema)?;
    let mut batches = Vec::new();
    table.read(&snapshot, None, |rows| batches.push(rows))?;
    Ok(batches)
}

/// A table.
pub(crate) struct DeltaTable {
    schema: &'static Schema,
    root: Url,
    engine: Arc<Engine>,
}

/// Rows of a day.
pub(crate) struct DayRows {
    pub(crate) rows: RecordBatch,
    pub(crate) appended_at: Timestamp,
}

/// A file that a commit can add.
pub(crate) struct File {
    context: BoundWriteContext,
    meta: FileMeta,
    statistics: StructArray,
}

impl DeltaTable {
    /// The error that something about the table cannot be used.
    pub(crate) fn unsuitable(&self, problem: &impl ToString) -> TableError {
        TableError::Unsuitable {
            table: self.schema.table,
            problem: problem.to_string(),
        }
    }

    fn failed(&self, step: &'static str) -> impl Fn(KernelError) -> TableError + use<> {
        let table = self.schema.table;
        move |source| TableError::Failed {
            table,
            step,
            source: Box::new(source),
        }
    }

    /// Visits the rows of a snapshot, with these columns or all. Blocks.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub(crate) fn read(
        &self,
        snapshot: &SnapshotRef,
        columns: Option<&[&str]>,
        mut visit: impl FnMut(RecordBatch),
    ) -> Result<(), TableError> {
        let mut read = || -> KernelResult<()> {
            let columns = columns
                .map(|columns| snapshot.schema().project(columns))
                .transpose()?;
            let scan = snapshot.clone().scan_builder().with_schema_opt(columns).build()?;
            for batch in scan.execute(self.engine.clone())? {
                visit(batch?.try_into_record_batch()?);
            }
            Ok(())
        };
        read().map_err(self.failed("reading"))
    }

    fn load(&self) -> KernelResult<SnapshotRef> {
        let builder = Snapshot::builder_for(self.root.as_str());
        builder
            .with_incremental_crc_replay(IncrementalReplay::Unlimited)
            .build(&*self.engine)
    }

    fn newest(&self) -> KernelResult<SnapshotRef> {
        let snapshot = self.load()?;
        if snapshot.crc_at_version().is_some() {
            return Ok(snapshot);
        }
        // Contains all positions, so that the log is read only once.
        Ok(match snapshot.write_checksum(&*self.engine) {
            Ok((_, snapshot)) => snapshot,
            Err(error) => {
                tracing::debug!(
                    table = self.schema.table,
                    error = error_chain(&error),
                    "cannot write a checksum"
                );
                snapshot
            }
        })
    }

    /// Whether there is a log.
    fn exists(&self) -> KernelResult<bool> {
        // The kernel wants a directory to exist, unlike a part of an object store.
        if let ("file", Ok(directory)) = (self.root.scheme(), self.root.to_file_path()) {
            std::fs::create_dir_all(directory)?;
        }
        let log = self.root.join("_delta_log/")?;
        let entry = self.engine.storage_handler().list_from(&log)?.next();
        Ok(entry.transpose()?.is_some())
    }

    fn create(&self) -> KernelResult<SnapshotRef> {
        let columns = self
            .schema
            .columns
            .iter()
            .map(|column| field(column.name, column.kind));
        let columns = columns.chain([StructField::nullable(DAY, DataType::DATE)]);
        let schema = Arc::new(StructType::try_new(columns)?);
        let creation = create_table(self.root.as_str(), schema, ENGINE, false)
            .with_table_properties([("delta.dataSkippingStatsColumns", WITH_STATISTICS)])
            .with_data_layout(DataLayout::partitioned([DAY]))
            .build(&*self.engine, Box::new(FileSystemCommitter::new()));
        let created = match creation {
            Err(KernelError::TableAlreadyExistsAtPath(_)) => return self.newest(),
            creation => creation?.commit(&*self.engine)?,
        };
        if let CommitResult::Committed(created) = &created
            && let Some(snapshot) = created.post_commit_snapshot()
        {
            return Ok(snapshot.clone());
        }
        // Perhaps another process has created it.
        self.newest()
    }

    /// Checks properties that another engine may have set, also while this process runs.
    ///
    /// # Errors
    /// If one of them makes the table unsuitable.
    fn check(&self, snapshot: &Snapshot) -> Result<(), TableError> {
        let properties = snapshot.table_properties();
        if properties.set_transaction_retention_duration.is_some() {
            let problem = format!(
                "has the property {FORGETS}, which makes it forget what it contains; remove the property"
            );
            return Err(self.unsuitable(&problem));
        }
        match properties.column_mapping_mode {
            None | Some(ColumnMappingMode::None) => Ok(()),
            Some(_) => Err(self.unsuitable(
                &"has column mapping, with which files are not rewritten; write to another location",
            )),
        }
    }

    /// The columns that the table does not have yet.
    fn lacking(&self, snapshot: &Snapshot) -> Result<Vec<StructField>, TableError> {
        self.check(snapshot)?;
        let existing = snapshot.schema();
        let mut lacking = Vec::new();
        for column in self.schema.columns {
            let needed = field(column.name, column.kind);
            match existing.field(column.name) {
                None => lacking.push(needed),
                Some(found) if found.data_type() == needed.data_type() => {}
                Some(found) => {
                    let problem = format!(
                        "has a column `{}` of type {}; must be {}",
                        column.name,
                        found.data_type(),
                        needed.data_type()
                    );
                    return Err(self.unsuitable(&problem));
                }
            }
        }
        Ok(lacking)
    }

    fn add_columns(&self, snapshot: &SnapshotRef, columns: Vec<StructField>) -> KernelResult<SnapshotRef> {
        let alter = snapshot
            .clone()
            .update_table(UpdateTableOperation::AlterTable, ENGINE, false);
        let alter = columns
            .into_iter()
            .fold(alter, UpdateTableTransactionBuilder::add_column);
        let altered = alter
            .build(&*self.engine, Box::new(FileSystemCommitter::new()))?
            .commit(&*self.engine)?;
        match altered {
            // Not at once: whatever has failed may fail again.
            CommitResult::Retryable(retryable) => Err(retryable.error),
            // After a conflict, the newest snapshot decides whether columns are lacking.
            _ => self.newest(),
        }
    }

    fn write_file(
        &self,
        snapshot: &SnapshotRef,
        rows: &RecordBatch,
        day: Option<i32>,
        now: Timestamp,
    ) -> KernelResult<File> {
        let day = day.map_or(Scalar::Null(DataType::DATE), Scalar::Date);
        let transaction = snapshot
            .clone()
            .update_table(UpdateTableOperation::StreamingUpdate, ENGINE, true)
            .build(&*self.engine, Box::new(FileSystemCommitter::new()))?;
        let context = transaction
            .write_state()?
            .write_context_builder()
            .with_partition_values(HashMap::from([(DAY.to_owned(), day)]))
            .build()?;
        let statistics = collect_stats(rows, context.stats_columns(), context.physical_data_schema())?;
        let bytes = parquet(rows)?;
        let url = context
            .write_dir()
            .join(&format!("{:032x}.parquet", fastrand::u128(..)))?;
        let meta = FileMeta::new(url.clone(), now.as_millis(), bytes.len() as u64);
        // Never over another file.
        self.engine.storage_handler().put(&url, bytes.into(), false)?;
        Ok(File {
            context,
            meta,
            statistics,
        })
    }

    fn try_commit(
        &self,
        snapshot: &SnapshotRef,
        file: Option<&File>,
        positions: &[Move],
    ) -> KernelResult<CommitResult> {
        let update = snapshot
            .clone()
            .update_table(UpdateTableOperation::StreamingUpdate, ENGINE, true);
        let update = positions.iter().fold(update, |update, moved| {
            update.with_transaction_id(&*moved.id, moved.to)
        });
        let update = match file {
            Some(_) => update.with_blind_append(),
            None => update,
        };
        let mut transaction = update.build(&*self.engine, Box::new(FileSystemCommitter::new()))?;
        if let Some(file) = file {
            let written = DataFileMetadata::new(file.meta.clone(), file.statistics.clone());
            transaction.add_files(build_add_file_metadata(written, &file.context)?);
        }
        transaction.commit(&*self.engine)
    }

    /// Writes a checkpoint, if one is due after this snapshot. A failure only makes reading slower.
    pub(crate) fn checkpoint(&self, snapshot: &SnapshotRef) -> Option<SnapshotRef> {
        let is_due = snapshot.version() > 0 && snapshot.version().is_multiple_of(CHECKPOINT_EVERY);
        is_due.then(|| self.write_checkpoint(snapshot)).flatten()
    }

    /// As [`DeltaTable::checkpoint`], if none was written for longer, because somebody else has committed the versions that are due. Blocks.
    ///
    /// # Errors
    /// If the log cannot be listed.
    pub(crate) fn checkpoint_if_missed(&self, snapshot: SnapshotRef) -> Result<SnapshotRef, TableError> {
        let last = self.last_checkpoint().map_err(self.failed("listing files"))?;
        let is_missed = snapshot.version() >= last.unwrap_or(0) + CHECKPOINT_EVERY;
        let written = is_missed.then(|| self.write_checkpoint(&snapshot)).flatten();
        Ok(written.unwrap_or(snapshot))
    }

    fn write_checkpoint(&self, snapshot: &SnapshotRef) -> Option<SnapshotRef> {
        let written = snapshot.checkpoint(&*self.engine, None);
        let written = written.and_then(|(_, snapshot)| snapshot.write_checksum(&*self.engine));
        match written {
            Ok((_, snapshot)) => Some(snapshot),
            Err(error) => {
                tracing::warn!(
                    table = self.schema.table,
                    error = error_chain(&error),
                    "cannot write a checkpoint; continuing without it"
                );
                None
            }
        }
    }
}

impl Table for DeltaTable {
    type Snapshot = SnapshotRef;
    type Rows = DayRows;
    type File = File;
    type Error = TableError;

    fn refresh(&self, snapshot: &SnapshotRef) -> Result<SnapshotRef, TableError> {
        let builder = Snapshot::builder_from(snapshot.clone());
        let builder = builder.with_incremental_crc_replay(IncrementalReplay::Unlimited);
        let refreshed = builder.build(&*self.engine);
        // The entries after an old snapshot may have been deleted.
        refreshed
            .or_else(|_| self.newest())
            .map_err(self.failed("reading the log"))
    }

    fn position(&self, snapshot: &SnapshotRef, id: &str) -> Result<Option<i64>, TableError> {
        self.check(snapshot)?;
        let position = snapshot.get_app_id_version(id, &*self.engine);
        position.map_err(self.failed("reading positions"))
    }

    fn write(&self, snapshot: &SnapshotRef, rows: &DayRows) -> Result<File, TableError> {
        let day = rows.appended_at.as_millis().div_euclid(MILLIS_PER_DAY);
        let day = i32::try_from(day).unwrap_or(i32::MAX);
        self.write_file(snapshot, &rows.rows, Some(day), rows.appended_at)
            .map_err(self.failed("writing a file"))
    }

    fn is_abandoned(&self, file: &File) -> bool {
        let age = SystemClock.now().as_millis() - file.meta.last_modified;
        u128::try_from(age).is_ok_and(|age| age > LONGEST_APPEND.as_millis())
    }

    fn commit(
        &self,
        snapshot: &SnapshotRef,
        file: Option<&File>,
        positions: &[Move],
    ) -> Commit<SnapshotRef, TableError> {
        let failed = self.failed("committing to the log");
        match self.try_commit(snapshot, file, positions) {
            Ok(CommitResult::Committed(done)) => match done.post_commit_snapshot() {
                Some(snapshot) => Commit::Done(snapshot.clone()),
                // The refreshed snapshot has the positions.
                None => Commit::Conflict,
            },
            Ok(CommitResult::Conflicted(_)) => Commit::Conflict,
            Ok(CommitResult::Retryable(retryable)) => Commit::Unknown(failed(retryable.error)),
            Err(error) => Commit::Unknown(failed(error)),
        }
    }
}

fn field(name: &str, kind: Kind) -> StructField {
    let kind = match kind {
        Kind::Text => DataType::STRING,
        Kind::Int => DataType::INTEGER,
        Kind::Long => DataType::LONG,
        Kind::Time => DataType::TIMESTAMP,
        Kind::Flag => DataType::BOOLEAN,
    };
    StructField::nullable(name, kind)
}

/// A Parquet file with these rows. Without Arrow's own schema, which other readers ignore.
fn parquet(rows: &RecordBatch) -> KernelResult<Vec<u8>> {
    let properties = WriterProperties::builder().set_compression(Compression::ZSTD(ZstdLevel::default()));
    let options = ArrowWriterOptions::new()
        .with_skip_arrow_metadata(true)
        .with_properties(properties.build());
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new_with_options(&mut bytes, rows.schema(), options)?;
    writer.write(rows)?;
    writer.close()?;
    Ok(bytes)
}

#[cfg(test)]
mod tests;
