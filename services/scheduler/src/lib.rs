//! The scheduler: jobs are accepted from a topic and go to their application's topic when they are due,
//! exactly once and never early.

pub mod index;
pub mod job;
