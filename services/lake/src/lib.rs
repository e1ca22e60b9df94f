//! The lake appends what topics say about records and jobs to Delta tables, which any SQL engine reads: one row per record, exactly once.
//!
//! A table contains the offsets up to which it has read each partition: application transactions of Delta, which are committed together
//! with the rows. A commit succeeds only if nobody has committed since its snapshot, with which the offsets were compared. So neither a crash nor
//! a second process duplicates or loses rows.
//!
//! | module | responsibility |
//! |---|---|
//! | `config` | the sections of the configuration |
//! | `schema` | the tables and their columns |
//! | `batch` | rows in memory, column by column |
//! | `rows` | what a record says, as a row |
//! | `sources` | which topics belong to which tables |
//! | `appender` | the protocol of a table: compare, commit, and what follows from a conflict or an unknown outcome |
//! | `delta` | the protocol's access to a table, with `delta_kernel` |
//! | `ingest` | the thread that reads topics and commits rows |
//! | `maintain` | merges files, deletes what is not needed, removes rows |
//! | `metrics` | the metrics |
//! | `check` | a command that looks for rows of the same record |
//! | `baseline` | what benchmarks compare the service with |

mod config;

#[cfg(feature = "tables")]
mod appender;
#[cfg(feature = "tables")]
mod baseline;
#[cfg(feature = "tables")]
mod batch;
#[cfg(feature = "tables")]
mod check;
#[cfg(feature = "tables")]
mod delta;
#[cfg(feature = "tables")]
mod ingest;
#[cfg(feature = "tables")]
mod maintain;
#[cfg(feature = "tables")]
mod metrics;
#[cfg(feature = "tables")]
mod rows;
#[cfg(feature = "tables")]
mod schema;
#[cfg(feature = "tables")]
mod service;
#[cfg(feature = "tables")]
mod sources;

#[cfg(feature = "tables")]
pub use crate::baseline::Baseline;
#[cfg(feature = "tables")]
pub use crate::check::check_tables;
pub use crate::config::{LakeConfig, Sections};
#[cfg(feature = "tables")]
#[doc(hidden)]
pub use crate::delta::read;
#[cfg(feature = "tables")]
pub use crate::maintain::{maintain_tables, purge_rows};
#[cfg(feature = "tables")]
pub use crate::service::{check, run};
