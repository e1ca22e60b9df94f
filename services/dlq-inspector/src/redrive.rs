//! Redrives, discards and restores of dead letters, as jobs.
//!
//! The truth is the topic `dlq_inspector.redrive.topic`: compacted, with one partition. Each inspector follows it, callers change it by compare-and-set, and the
//! inspector whose lane owns the partition executes the jobs, see `docs/adr/0042-redrive.md`.
//!
//! | module | contents |
//! |---|---|
//! | [`record`] | where a dead letter may go, and the record that is written there |
//! | [`job`] | a job, its progress and its state |
//! | [`jobs`] | what the topic contains |
//! | [`edit`] | how a record is edited |
//! | [`change`] | changes by callers |
//! | [`refusal`] | why a change is refused |
//! | [`room`] | which jobs are removed for a new one |
//! | [`pace`] | what the executor does next |
//! | [`doubts`] | which answers of Kafka count only once they have lasted |
//! | [`omitted`] | dead letters whose payload was left out |
//! | [`outcomes`] | what became of the items of a job, and where their records are |
//! | `gone` | below which offsets Kafka has deleted dead letters for good |
//! | `ledger_states` | what the ledger says about dead letters, and which entries are not needed any more |
//! | `removal` | when the executor removes entries of the ledger, and what it writes |
//! | [`step`] | what becomes of some dead letters of a job, and what is written |
//! | `ledger_reader`, `letter_reader` | read the ledger and the dead letters |
//! | `returns` | counts what has come back |
//! | `decider` | decides the steps, on a thread of its own |
//! | `executor` | the processor of the lane |
//! | `start` | starts the lane |

pub mod change;
pub(crate) mod decider;
pub mod doubts;
pub mod edit;
pub(crate) mod executor;
pub(crate) mod gone;
pub mod job;
pub mod jobs;
pub(crate) mod ledger_reader;
pub(crate) mod ledger_states;
pub(crate) mod letter_reader;
pub mod omitted;
pub mod outcomes;
pub mod pace;
pub mod record;
pub mod refusal;
pub(crate) mod removal;
pub(crate) mod returns;
pub mod room;
pub(crate) mod start;
pub mod step;

/// The consumer group of all inspectors that execute jobs of this topic, and the transactional id of all changes by callers. It depends on nothing
/// else, not even on `kafka.id_prefix`: each job is executed by one process, and writers with different ids would not fence each other.
#[must_use]
pub fn own_id(topic: &str) -> String {
    format!("redeliver-redrives-{topic}")
}

/// Whether a text has the form of the id of a job.
pub(crate) fn is_job_id(text: &str) -> bool {
    text.len() == 16 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}
