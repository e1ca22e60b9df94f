//! `redeliver-lake check`: whether tables contain each record at most once, and none that they would append again; and the gaps. Compared with Kafka: whether
//! they contain each record that a consumer sees.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use delta_kernel::SnapshotRef;
use delta_kernel::arrow::array::{Array as _, AsArray as _, RecordBatch};
use delta_kernel::arrow::datatypes::{Int32Type, Int64Type};
use delta_kernel::arrow::error::ArrowError;
use delta_kernel::arrow::util::display::array_value_to_string;
use redeliver_kafka::reader::TopicReader;
use redeliver_kafka::survey::Surveyor;
use redeliver_runtime::cli::{CommonArgs, EXIT_FAILURE, report};
use redeliver_runtime::config::ProgramConfig;
use redeliver_service::login::kafka_of_command;
use tokio::runtime::Runtime;

use crate::appender::Table as _;
use crate::config::Sections;
use crate::delta::{DeltaTable, Store, TableError};
use crate::ingest::{application_id, text_of};
use crate::schema::{GAPS, Schema, TABLES};
use crate::service::location;
use crate::sources::Sources;

/// The columns that identify a record, and the one that says what did not fit.
const COLUMNS: [&str; 5] = [
    "kafka_topic",
    "kafka_topic_id",
    "kafka_partition",
    "kafka_offset",
    "unfit",
];

/// The columns of `gaps` that are listed, by which the newest are found.
const GAP: [&str; 7] = [
    "noticed_at",
    "table_name",
    "kafka_topic",
    "kafka_partition",
    "kafka_offset",
    "until_offset",
    "cause",
];

/// Offsets, as runs: the first one of each, and the one after its last.
#[derive(Debug, Default)]
struct Offsets(BTreeMap<i64, i64>);

/// A table, and what was found in it.
struct Checked {
    table: DeltaTable,
    snapshot: SnapshotRef,
    found: Found,
}

#[derive(Debug, Default)]
struct Found {
    rows: u64,
    /// Rows with a value that did not fit.
    unfit: u64,
    /// By topic, its id and partition.
    partitions: BTreeMap<(String, String, i32), Offsets>,
    /// Some records that have several rows, or that the table would append again.
    wrong: Vec<String>,
}

/// How many wrong records, and how many gaps, are listed.
const LISTED: usize = 20;
/// How long reading a topic may take.
const READ_TIMEOUT: Duration = Duration::from_secs(3_600);

impl Offsets {
    /// Whether the offset is new.
    fn add(&mut self, offset: i64) -> bool {
        let before = self
            .0
            .range(..=offset)
            .next_back()
            .map(|(first, end)| (*first, *end));
        if before.is_some_and(|(_, end)| offset < end) {
            return false;
        }
        let first = match before {
            Some((first, end)) if end == offset => first,
            _ => offset,
        };
        let end = self.0.remove(&(offset + 1)).unwrap_or(offset + 1);
        self.0.insert(first, end);
        true
    }

    fn has(&self, offset: i64) -> bool {
        let before = self.0.range(..=offset).next_back();
        before.is_some_and(|(_, end)| offset < *end)
    }

    /// The offset after the last one.
    fn end(&self) -> i64 {
        self.0.last_key_value().map_or(0, |(_, end)| *end)
    }
}

impl Found {
    fn add(&mut self, rows: &RecordBatch) {
        let column = |name: &str| rows.column_by_name(name);
        let (Some(topic), Some(id), Some(partition), Some(offset), Some(unfit)) = (
            column(COLUMNS[0]).and_then(|column| column.as_string_opt::<i32>()),
            column(COLUMNS[1]).and_then(|column| column.as_string_opt::<i32>()),
            column(COLUMNS[2]).and_then(|column| column.as_primitive_opt::<Int32Type>()),
            column(COLUMNS[3]).and_then(|column| column.as_primitive_opt::<Int64Type>()),
            column(COLUMNS[4]),
        ) else {
            self.wrong.push("rows without a position".to_owned());
            return;
        };
        self.rows += rows.num_rows() as u64;
        self.unfit += (rows.num_rows() - unfit.null_count()) as u64;
        for row in 0..rows.num_rows() {
            let key = (
                topic.value(row).to_owned(),
                id.value(row).to_owned(),
                partition.value(row),
            );
            if !self.partitions.entry(key).or_default().add(offset.value(row)) {
                let (topic, partition, offset) = (topic.value(row), partition.value(row), offset.value(row));
                self.wrong
                    .push(format!("{topic}/{partition}/{offset} has several rows"));
            }
        }
    }
}

/// Checks all tables, prints what was found, and returns 0 if nothing is wrong.
pub fn check_tables(args: &CommonArgs, against_kafka: bool) -> ExitCode {
    match run(args, against_kafka) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(EXIT_FAILURE),
        Err(error) => report(&*error),
    }
}

fn run(args: &CommonArgs, against_kafka: bool) -> anyhow::Result<bool> {
    let config: ProgramConfig<Sections> = args.load()?;
    let location = location(&config.own)?;
    let runtime = Runtime::new()?;
    let store = Store::new(location, runtime.handle().clone())?;
    let (mut is_correct, mut tables) = (true, Vec::new());
    println!("{:<14}{:>14}{:>12}{:>10}", "TABLE", "ROWS", "PARTITIONS", "UNFIT");
    // Several gaps of a partition can begin at the same offset: one for each table.
    for schema in TABLES.into_iter().filter(|schema| schema.table != GAPS.table) {
        let checked = check_table(&store, schema)?;
        let found = &checked.found;
        println!(
            "{:<14}{:>14}{:>12}{:>10}",
            schema.table,
            found.rows,
            found.partitions.len(),
            found.unfit
        );
        for wrong in found.wrong.iter().take(LISTED) {
            println!("  {wrong}");
        }
        is_correct &= found.wrong.is_empty();
        tables.push(checked);
    }
    list_gaps(&store)?;
    if against_kafka {
        is_correct &= has_records_of_kafka(&config, &tables)?;
    }
    Ok(is_correct)
}

/// Prints which records tables lack because Kafka had deleted or lost them: the newest gaps. They are no mistake of the tables.
fn list_gaps(store: &Store) -> Result<(), TableError> {
    let (table, snapshot) = store.open_existing(&GAPS)?;
    let mut gaps = Vec::new();
    table.read(&snapshot, Some(&GAP), |rows| {
        gaps.extend(
            (0..rows.num_rows()).map(|row| -> Result<Vec<String>, ArrowError> {
                let cells = rows.columns().iter();
                cells.map(|cells| array_value_to_string(cells, row)).collect()
            }),
        );
    })?;
    let gaps: Result<Vec<_>, _> = gaps.into_iter().collect();
    let mut gaps = gaps.map_err(|error| table.unsuitable(&error))?;
    gaps.sort_unstable();
    println!("{} gaps", gaps.len());
    for gap in gaps.iter().rev().take(LISTED) {
        if let [noticed_at, table, topic, partition, from, until, cause] = &gap[..] {
            println!(
                "  {table} lacks {topic}/{partition} from {from} until before {until}: {cause}, noticed at {noticed_at}"
            );
        }
    }
    Ok(())
}

/// Whether the tables have all records that are in Kafka before their positions. Prints some of those that they lack.
fn has_records_of_kafka(config: &ProgramConfig<Sections>, tables: &[Checked]) -> anyhow::Result<bool> {
    let settings = kafka_of_command(&config.shared)?;
    let sources = Sources::new(&config.shared, &config.own);
    let (mut read, mut later, mut missing) = (0_u64, 0_u64, 0_usize);
    for topic in Surveyor::new(&settings)?.topics(|name| sources.of(name, "").is_some())? {
        let Some(id) = topic.id.map(text_of) else {
            anyhow::bail!("Kafka does not tell the id of topic {}", topic.name);
        };
        let Some(source) = sources.of(&topic.name, &id) else {
            continue;
        };
        let mut positions = BTreeMap::new();
        for &number in &source.tables {
            for partition in (0..).take(topic.partitions.len()) {
                let Checked { table, snapshot, .. } = &tables[number];
                let position = table.position(snapshot, &application_id(&topic.name, &id, partition))?;
                positions.insert((number, partition), position.unwrap_or(0));
            }
        }
        let mut reader = TopicReader::new(&settings, std::slice::from_ref(&topic.name))?;
        reader.read_to_end(READ_TIMEOUT, |record| {
            let at = &record.position;
            for &number in &source.tables {
                let position = positions.get(&(number, at.partition)).copied().unwrap_or(0);
                if at.offset >= position {
                    later += 1;
                    continue;
                }
                read += 1;
                let key = (topic.name.to_string(), id.clone(), at.partition);
                let offsets = tables[number].found.partitions.get(&key);
                if !offsets.is_some_and(|offsets| offsets.has(at.offset)) {
                    missing += 1;
                    if missing <= LISTED {
                        println!("{at} is not in {}", TABLES[number].table);
                    }
                }
            }
        })?;
    }
    println!("{read} rows compared with Kafka, {missing} missing, {later} not appended yet");
    Ok(missing == 0)
}

fn check_table(store: &Store, schema: &'static Schema) -> Result<Checked, TableError> {
    let (table, snapshot) = store.open_existing(schema)?;
    let mut found = Found::default();
    table.read(&snapshot, Some(&COLUMNS), |rows| found.add(&rows))?;
    let mut wrong = Vec::new();
    for ((topic, topic_id, partition), offsets) in &found.partitions {
        let position = table.position(&snapshot, &application_id(topic, topic_id, *partition))?;
        if position.is_none_or(|position| position < offsets.end()) {
            let end = offsets.end();
            wrong.push(format!(
                "{topic}/{partition} has rows before {end}, and its position is {position:?}"
            ));
        }
    }
    found.wrong.extend(wrong);
    Ok(Checked {
        table,
        snapshot,
        found,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_offsets_are_merged() {
        let mut offsets = Offsets::default();
        for offset in [5, 7, 6, 1, 0, 9] {
            assert!(offsets.add(offset), "{offset}");
        }
        assert_eq!(
            offsets.0.iter().collect::<Vec<_>>(),
            [(&0, &2), (&5, &8), (&9, &10)]
        );
        for offset in [0, 1, 5, 6, 7, 9] {
            assert!(!offsets.add(offset), "{offset}");
        }
        assert_eq!(offsets.end(), 10);
    }
}
