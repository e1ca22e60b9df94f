//! The `redeliver-lake` binary.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use redeliver_runtime::cli::{CommonArgs, ServiceArgs, ServiceCommand, UntilIdleArgs};
use redeliver_runtime::metrics;
use redeliver_service::main_of;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Append what happens to records and jobs to Delta tables, which SQL engines read
#[derive(Parser)]
#[command(version = metrics::version())]
struct Args {
    #[command(flatten)]
    common: CommonArgs,
    /// Kafka is the embedded broker of `redeliver dev`
    #[arg(long, hide = true)]
    embedded: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Clone, Subcommand)]
enum Command {
    #[command(flatten)]
    Service(ServiceCommand),
    /// Check that the tables contain no record twice, and list gaps; exit with status 1 if they contain one twice
    Check {
        /// Also read the topics, and check that the tables contain each record that a consumer sees. Purged rows count as missing
        #[arg(long)]
        against_kafka: bool,
    },
    /// Merge small files and delete those that no reader needs any more, as the service does every lake.maintenance_interval
    Maintain {
        /// Change nothing; say what would be merged and deleted
        #[arg(long)]
        dry_run: bool,
    },
    /// Remove the rows with these values from all tables that have these columns
    ///
    /// The rows are gone for readers at once, and from the store after lake.keep_replaced.
    Purge {
        /// The text of a column, such as key=customer-42 or job_id=7. Rows must match all of them
        #[arg(required = true, value_name = "COLUMN=VALUE", value_parser = condition)]
        conditions: Vec<(String, String)>,
        /// Change nothing; say how many rows would be removed
        #[arg(long)]
        dry_run: bool,
    },
    /// Only write rows to files, for benchmarks
    #[command(hide = true)]
    Baseline(redeliver_lake::Baseline),
}

fn condition(text: &str) -> Result<(String, String), &'static str> {
    let (column, value) = text
        .split_once('=')
        .ok_or("must be a column and its value, such as key=customer-42")?;
    Ok((column.to_owned(), value.to_owned()))
}

fn main() -> ExitCode {
    let Args {
        common,
        embedded,
        command,
    } = Args::parse();
    let service = match command {
        // Only the configuration is wanted, whatever the command would do with it.
        _ if common.check || common.print_config => None,
        Some(Command::Check { against_kafka }) => {
            return redeliver_lake::check_tables(&common, against_kafka);
        }
        Some(Command::Maintain { dry_run }) => return redeliver_lake::maintain_tables(&common, dry_run),
        Some(Command::Purge { conditions, dry_run }) => {
            return redeliver_lake::purge_rows(&common, &conditions, dry_run);
        }
        Some(Command::Baseline(baseline)) => return baseline.run(&common),
        Some(Command::Service(command)) => Some(command),
        None => None,
    };
    let args = ServiceArgs {
        common,
        command: service,
    };
    main_of(
        "lake",
        &args,
        UntilIdleArgs::default(),
        redeliver_lake::check,
        |start, own| redeliver_lake::run(start, own, embedded),
    )
}
