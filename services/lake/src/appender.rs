//! The protocol by which rows are appended exactly once.
//!
//! A snapshot of a table contains its positions: for each partition, the offset of the first record that is not in the table. A commit adds rows and moves
//! the positions of their partitions, and succeeds only as the next one after its snapshot. Before each attempt, the positions of the snapshot are compared:
//!
//! | they are | then |
//! |---|---|
//! | those from which the rows were gathered | the rows are committed |
//! | those after the rows | an earlier attempt has committed them, although its outcome was unknown |
//! | others | another process has written. The rows are dropped, and reading goes on from the positions |
//!
//! The snapshot is refreshed before the first attempt: an entry after an old one may have been deleted, so that a commit after it would succeed, and be seen by
//! nobody. After a conflict or an unknown outcome, the snapshot is refreshed and compared again; neither is ever taken for a success or a failure. An attempt whose
//! request arrives late can only fail, or have succeeded: the snapshot decides.

use redeliver_kafka::fault;

/// A table, as far as the protocol needs it.
pub(crate) trait Table {
    /// The table at a moment.
    type Snapshot;
    /// Rows to append.
    type Rows;
    /// Rows in a file that no snapshot contains yet.
    type File;
    type Error;

    /// The newest snapshot.
    fn refresh(&self, snapshot: &Self::Snapshot) -> Result<Self::Snapshot, Self::Error>;

    /// The position of a partition in a snapshot; `None` if it has none.
    fn position(&self, snapshot: &Self::Snapshot, id: &str) -> Result<Option<i64>, Self::Error>;

    /// Writes a file.
    fn write(&self, snapshot: &Self::Snapshot, rows: &Self::Rows) -> Result<Self::File, Self::Error>;

    /// Whether a file was written so long ago that it may have been deleted as one that nobody will commit.
    fn is_abandoned(&self, file: &Self::File) -> bool;

    /// Commits a file and positions as the next commit after a snapshot.
    fn commit(
        &self,
        snapshot: &Self::Snapshot,
        file: Option<&Self::File>,
        positions: &[Move],
    ) -> Commit<Self::Snapshot, Self::Error>;
}

/// How an attempt to commit ended.
#[derive(Debug)]
pub(crate) enum Commit<S, E> {
    /// It succeeded. The snapshot contains it.
    Done(S),
    /// Somebody else has committed after the snapshot.
    Conflict,
    /// Whether it has succeeded is unknown, as after every error.
    Unknown(E),
}

/// The position of a partition before and after rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    /// The id of the partition: an application id of Delta.
    pub(crate) id: String,
    /// `None`: the table has no position.
    pub(crate) from: Option<i64>,
    pub(crate) to: i64,
}

/// Rows that are to be appended, until they are, or are dropped.
struct Pending<T: Table> {
    rows: Option<T::Rows>,
    file: Option<T::File>,
    moves: Vec<Move>,
}

/// How an append ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Appended {
    /// The rows are in the table. `conflicts`: how often somebody else was first.
    Done { conflicts: u32 },
    /// Another process has written the same partitions, so the rows were dropped.
    Overtaken,
    /// The rows could not be committed for so long that they were dropped.
    Abandoned,
}

/// Appends to a table.
pub(crate) struct Appender<T: Table> {
    table: T,
    snapshot: T::Snapshot,
    pending: Option<Pending<T>>,
}

impl<T: Table> Appender<T> {
    pub(crate) fn new(table: T, snapshot: T::Snapshot) -> Self {
        Self {
            table,
            snapshot,
            pending: None,
        }
    }

    pub(crate) fn table(&self) -> &T {
        &self.table
    }

    pub(crate) fn snapshot(&self) -> &T::Snapshot {
        &self.snapshot
    }

    /// Replaces the snapshot by another one of the same or a later moment.
    pub(crate) fn replace_snapshot(&mut self, snapshot: T::Snapshot) {
        self.snapshot = snapshot;
    }

    /// The position of a partition, as of the last snapshot.
    pub(crate) fn position(&self, id: &str) -> Result<Option<i64>, T::Error> {
        self.table.position(&self.snapshot, id)
    }

    /// Whether rows are left that could not be appended. Nothing else can be appended before.
    pub(crate) fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Drops what is left.
    pub(crate) fn drop_pending(&mut self) {
        self.pending = None;
    }

    /// Appends rows, or only moves positions.
    ///
    /// # Errors
    /// If the table cannot be read or written. The rows are left: [`Appender::resume`] tries again.
    pub(crate) fn append(&mut self, rows: Option<T::Rows>, moves: Vec<Move>) -> Result<Appended, T::Error> {
        debug_assert!(self.pending.is_none());
        self.pending = Some(Pending {
            rows,
            file: None,
            moves,
        });
        self.resume()
    }

    /// Appends what is left.
    ///
    /// # Errors
    /// As [`Appender::append`].
    pub(crate) fn resume(&mut self) -> Result<Appended, T::Error> {
        let mut conflicts = 0;
        let Some(pending) = &mut self.pending else {
            return Ok(Appended::Done { conflicts });
        };
        if let Some(rows) = &pending.rows {
            fault::point("lake_before_file");
            pending.file = Some(self.table.write(&self.snapshot, rows)?);
            // The file has them.
            pending.rows = None;
            fault::point("lake_after_file");
        }
        self.snapshot = self.table.refresh(&self.snapshot)?;
        let mut failed = None;
        loop {
            let mut found = Vec::with_capacity(pending.moves.len());
            for moved in &pending.moves {
                found.push(self.table.position(&self.snapshot, &moved.id)?);
            }
            let are = |expected: fn(&Move) -> Option<i64>| {
                pending.moves.iter().map(expected).eq(found.iter().copied())
            };
            if are(|moved| Some(moved.to)) {
                self.pending = None;
                return Ok(Appended::Done { conflicts });
            }
            if !are(|moved| moved.from) {
                self.pending = None;
                return Ok(Appended::Overtaken);
            }
            // Not at once: whatever has failed may fail again.
            if let Some(error) = failed.take() {
                return Err(error);
            }
            if pending
                .file
                .as_ref()
                .is_some_and(|file| self.table.is_abandoned(file))
            {
                self.pending = None;
                return Ok(Appended::Abandoned);
            }
            fault::point("lake_before_commit");
            match self
                .table
                .commit(&self.snapshot, pending.file.as_ref(), &pending.moves)
            {
                Commit::Done(snapshot) => {
                    fault::point("lake_after_commit");
                    self.snapshot = snapshot;
                    self.pending = None;
                    return Ok(Appended::Done { conflicts });
                }
                Commit::Conflict => conflicts += 1,
                Commit::Unknown(error) => failed = Some(error),
            }
            self.snapshot = self.table.refresh(&self.snapshot)?;
        }
    }
}

#[cfg(test)]
mod tests;
