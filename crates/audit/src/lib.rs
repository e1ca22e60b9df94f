//! The oracle: proves for a pipeline that every record of its source is exactly once in the output, dead or
//! still waiting, that none was released before its due time, and that no byte was changed on the way.
//!
//! | module | idea |
//! |---|---|
//! | [`run`] | one consistent pass over the topics of a pipeline that may be running |
//! | [`ledger`] | what was seen, and what follows from it; no IO |
//! | [`report`] | the findings, for people and as JSON |
//!
//! It knows nothing of how the services work: it reads topics and committed positions from outside, so that
//! a mistake in the services cannot hide itself.

mod content;
pub mod ledger;
pub mod report;
pub mod run;
mod table;

pub use ledger::{Ledger, OutputCheck, Scheduled};
pub use report::{Finding, Findings, Lateness, Report, Waiting};
pub use run::{AuditError, AuditOptions, audit};
