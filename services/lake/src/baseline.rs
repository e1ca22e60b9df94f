//! `redeliver-lake baseline`, for `cargo xtask bench lake`: the same rows in the same Parquet files, without tables, positions and other topics.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use redeliver_core::Record;
use redeliver_dlq_inspector::masking::Masking;
use redeliver_kafka::follow::{Event, Follower, Origin};
use redeliver_runtime::ProgramConfig;
use redeliver_runtime::cli::{CommonArgs, report};
use redeliver_service::login::kafka_of_command;

use crate::batch::Batch;
use crate::config::Sections;
use crate::delta::parquet;
use crate::rows::Rows;
use crate::schema::{Schema, TABLES};
use crate::sources::{Source, Sources};

/// How many records are read before those that are in memory are written.
const IN_MEMORY: usize = 100_000;
const POLL_TIMEOUT: Duration = Duration::from_millis(200);

/// Arguments of the command.
#[derive(Clone, Debug, clap::Args)]
pub struct Baseline {
    /// A topic with records for a table
    topic: String,
    /// Records
    #[arg(long)]
    count: usize,
    #[arg(long)]
    rows_per_file: usize,
    /// An existing directory for the files
    #[arg(long)]
    files: PathBuf,
}

/// Writes rows to files.
struct Writer<'b> {
    of: &'b Baseline,
    source: Source,
    schema: &'static Schema,
    rows: Rows,
    batch: Batch,
    /// The number of files.
    written: usize,
}

impl Writer<'_> {
    fn add(&mut self, record: &Record) {
        self.rows
            .add(&mut self.batch, self.schema, record, &self.source.origin);
    }

    fn is_full(&self) -> bool {
        self.batch.rows() >= self.of.rows_per_file
    }

    fn write(&mut self) -> anyhow::Result<()> {
        let file = self.of.files.join(format!("{}.parquet", self.written));
        self.written += 1;
        std::fs::write(file, parquet(&self.batch.take()?)?).context("writing a file")
    }
}

impl Baseline {
    /// Prints how many rows per second were read and written, and how many were written of records in memory.
    pub fn run(&self, args: &CommonArgs) -> ExitCode {
        match self.measure(args) {
            Ok([read, in_memory]) => println!("{read:.0} {in_memory:.0}"),
            Err(error) => return report(&*error),
        }
        ExitCode::SUCCESS
    }

    #[expect(clippy::cast_precision_loss, reason = "rates are rounded")]
    fn measure(&self, args: &CommonArgs) -> anyhow::Result<[f64; 2]> {
        let config: ProgramConfig<Sections> = args.load()?;
        let sources = Sources::new(&config.shared, &config.own);
        let source = sources
            .of(&self.topic, "00000000-0000-0000-0000-000000000000")
            .context("no table has rows of this topic")?;
        let mut writer = Writer {
            of: self,
            schema: TABLES[source.tables[0]],
            batch: Batch::new(TABLES[source.tables[0]]),
            source,
            rows: Rows::new(Masking::new(&config.own.dlq_inspector.masking), &config.own.lake),
            written: 0,
        };
        let settings = kafka_of_command(&config.shared)?;
        let follow = || Follower::of_topics(&settings, &[self.topic.as_str().into()], Origin::Beginning);

        // From the first record on, so that connecting is not measured.
        let (mut started, mut read) = (None, 0);
        let mut follower = follow()?;
        while read < self.count {
            let mut refused = None;
            follower.poll(POLL_TIMEOUT, |event| {
                match event {
                    Event::Record(record) => {
                        started.get_or_insert_with(Instant::now);
                        writer.add(&record);
                        read += 1;
                    }
                    Event::End { .. } => {}
                    Event::Refused { error, .. } => refused = Some(error),
                }
                if read == self.count || refused.is_some() || writer.is_full() {
                    return ControlFlow::Break(());
                }
                ControlFlow::Continue(())
            })?;
            if let Some(error) = refused {
                bail!("reading {}: {error}", self.topic);
            }
            if writer.is_full() || read == self.count {
                writer.write()?;
            }
        }
        let seconds = started.context("no records")?.elapsed().as_secs_f64();
        let rate_of_reading = read as f64 / seconds;

        let mut follower = follow()?;
        let mut records = Vec::new();
        while records.len() < IN_MEMORY.min(self.count) {
            records.extend(follower.next(POLL_TIMEOUT)?);
        }
        drop(follower);
        let started = Instant::now();
        for record in records.iter().cycle().take(self.count) {
            writer.add(record);
            if writer.is_full() {
                writer.write()?;
            }
        }
        writer.write()?;
        Ok([
            rate_of_reading,
            self.count as f64 / started.elapsed().as_secs_f64(),
        ])
    }
}
