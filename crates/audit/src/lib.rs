//! The audit of a pipeline: checks that each record of the source is exactly once in the output, in the dead letters or
//! waiting, that no record was released early, and that no key, value or user header was changed.
//!
//! | module | contents |
//! |---|---|
//! | [`run`] | why the order of reading proves something; audits once, or again and again |
//! | [`pass`] | reads the topics of a pipeline, which may be running |
//! | [`ledger`] | collects the copies of each record and classifies defects; no IO |
//! | [`report`] | the report, as text and as JSON |
//!
//! The audit does not use the services. It reads topics and committed offsets, so that a defect of a service cannot
//! hide itself.

mod content;
pub mod ledger;
pub mod pass;
pub mod report;
pub mod run;
mod table;

pub use ledger::{Ledger, Scheduled};
pub use pass::{Fault, Pace, PipelineAudit};
pub use report::{Finding, Findings, Lateness, Report, Waiting};
pub use run::{AuditError, AuditOptions, Auditor, audit};
