//! The look-ahead: which jobs of the index are in the window.
//!
//! A scan reads all flows at once, each from its own position. So jobs that are due next are found however many jobs of another
//! flow are due before them. A flow from which everything up to [`LookAhead::base`] is in the window has no entry here: flows
//! without jobs cost nothing.
//!
//! # Parked flows
//! If the topic of a due job is unavailable, or its application is paused, its flow is *parked*: its jobs leave the window and stay in the state topic and in the
//! index, whose number of due jobs is all that is known of them. So any number of them takes no memory, and a takeover finds them
//! again as all other jobs. When the topic is available, the flow is read again. While it does not exist, only jobs that have waited for too long
//! are read, which become dead letters.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::{Timestamp, mutant};

use crate::index::{Cursor, FlowPosition, FlowScan, Scan, ScanRequest};
use crate::index_messages::ScannedJob;
use crate::job::Flow;
use crate::window::Window;

/// The maximum number and size of jobs per scan.
const MAX_JOBS: usize = 5_000;
const MAX_BYTES: usize = 4 << 20;
/// The time between two checks whether a flow is still parked.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The topic and the application of a job.
pub(crate) type Target = (Arc<str>, Arc<str>);

/// Why the due jobs of a flow cannot be dispatched.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Obstacle {
    /// Their topic does not exist or cannot be written.
    UnavailableTopic(Target),
    /// The application is paused.
    Paused(Arc<str>),
}

/// Which jobs of a parked flow can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Release {
    /// None.
    Nothing,
    /// All: there is no obstacle any more.
    All,
    /// The jobs that were due at or before this time: they have waited for too long.
    Until(Timestamp),
}

/// The position of the look-ahead in each flow.
#[derive(Debug, Default)]
pub(super) struct LookAhead {
    /// Every scheduled job up to this position is in the window, except for those of flows with an entry. `None`: nothing was read.
    base: Option<Cursor>,
    flows: HashMap<Flow, Entry>,
    /// The latest due time of the scan in progress.
    scan: Option<Timestamp>,
    rotation: usize,
}

/// A flow with scheduled jobs up to the base that may not be in the window.
#[derive(Debug)]
struct Entry {
    /// Every scheduled job of the flow up to this position is in the window. `None`: nothing was read.
    cursor: Option<Cursor>,
    /// How far the scan in progress reads the flow. `None`: it does not, or the position has moved since.
    scanned_until: Option<Timestamp>,
    /// [`Window::departures`] when the next job did not fit. Before others leave the window, another scan would be in vain.
    refused_at: Option<u64>,
    parked: Option<Parked>,
}

impl Entry {
    /// Moves the position, and returns what is before the new one.
    fn advance(&mut self, to: Cursor) -> Part {
        self.refused_at = None;
        Part {
            after: self.cursor.replace(to),
            to,
        }
    }

    /// Whether there is enough room for a scan.
    fn has_room(&self, flow: &Flow, window: &Window, worthwhile: usize) -> bool {
        let is_in_vain = self.refused_at == Some(window.departures());
        let is_worthwhile = !window.contains_flow(flow) || window.room_for(flow) >= worthwhile;
        !is_in_vain && is_worthwhile
    }

    /// Which jobs can be read now. Checks the obstacle of a parked flow from time to time.
    fn release(&mut self, now: Timestamp, release: &impl Fn(&Obstacle) -> Release) -> Release {
        let Some(parked) = &mut self.parked else {
            return Release::All;
        };
        // The clock may have been set back.
        if now < parked.next_check && parked.next_check <= now.after(CHECK_INTERVAL) {
            return Release::Nothing;
        }
        match release(&parked.obstacle) {
            Release::All => {
                self.parked = None;
                Release::All
            }
            Release::Until(due) if parked.first <= due => Release::Until(due),
            Release::Until(_) | Release::Nothing => {
                parked.next_check = now.after(CHECK_INTERVAL);
                Release::Nothing
            }
        }
    }
}

#[derive(Debug)]
struct Parked {
    obstacle: Obstacle,
    /// When to check the obstacle again.
    next_check: Timestamp,
    /// The due time of the first job, as far as it is known.
    first: Timestamp,
    /// The number of due jobs at the last scan.
    due: u64,
}

/// What a scan has read.
#[derive(Debug)]
pub(super) struct Parts {
    flows: HashMap<Flow, Part>,
    /// Of all flows without an entry.
    others: Part,
}

/// A part of a flow that a scan has read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// The jobs after this position ...
    after: Option<Cursor>,
    /// ... up to this one.
    to: Cursor,
}

impl Part {
    pub(super) fn contains(&self, cursor: Cursor) -> bool {
        Some(cursor) > self.after && cursor <= self.to
    }
}

impl LookAhead {
    fn cursor_of(&self, flow: &Flow) -> Option<Cursor> {
        self.flows.get(flow).map_or(self.base, |entry| entry.cursor)
    }

    /// Whether the flow has been read up to this position, so that a job there must be in the window.
    pub(super) fn has_passed(&self, flow: &Flow, cursor: Cursor) -> bool {
        Some(cursor) <= self.cursor_of(flow)
    }

    /// Whether nothing of the flow before this position is still to be read. False for a parked flow.
    pub(super) fn is_next(&self, flow: &Flow, cursor: Cursor) -> bool {
        let entry = self.flows.get(flow);
        entry.is_none_or(|entry| entry.parked.is_none() && Some(cursor) <= entry.cursor)
    }

    /// Takes note that a job at this position is not in the window. It is read again.
    pub(super) fn rewind(&mut self, flow: &Flow, cursor: Cursor) {
        if let Some(parked) = self.flows.get_mut(flow).and_then(|entry| entry.parked.as_mut()) {
            parked.first = parked.first.min(cursor.due);
        }
        if self.has_passed(flow, cursor) {
            let entry = self.entry(flow);
            entry.cursor = Some(cursor.before());
            entry.scanned_until = None;
            // Another job is the next one.
            entry.refused_at = None;
        }
    }

    fn entry(&mut self, flow: &Flow) -> &mut Entry {
        let cursor = self.base;
        self.flows.entry(flow.clone()).or_insert(Entry {
            cursor,
            scanned_until: None,
            refused_at: None,
            parked: None,
        })
    }

    /// Parks a flow whose first job is at this position.
    pub(super) fn park(&mut self, flow: &Flow, obstacle: Obstacle, first: Cursor, now: Timestamp) {
        self.rewind(flow, first);
        let entry = self.entry(flow);
        let due = entry.parked.as_ref().map_or(0, |parked| parked.due).max(1);
        entry.parked = Some(Parked {
            obstacle,
            next_check: now.after(CHECK_INTERVAL),
            first: first.due,
            due,
        });
    }

    /// The approximate number of due jobs of parked flows, by what they wait for.
    pub(super) fn parked(&self) -> BTreeMap<Obstacle, usize> {
        let mut counts = BTreeMap::new();
        for parked in self.flows.values().filter_map(|entry| entry.parked.as_ref()) {
            *counts.entry(parked.obstacle.clone()).or_default() +=
                usize::try_from(parked.due).unwrap_or(usize::MAX);
        }
        counts
    }

    /// The next scan: of the jobs that are due within this time, as far as there is room for them.
    pub(super) fn request(
        &mut self,
        now: Timestamp,
        ahead: Duration,
        window: &Window,
        release: impl Fn(&Obstacle) -> Release,
    ) -> Option<ScanRequest> {
        if self.scan.is_some() {
            return None;
        }
        let (until, horizon) = (now.after(ahead), now.after(ahead * 3 / 4));
        let worthwhile = window.worthwhile_room();
        let is_behind =
            |cursor: Option<Cursor>, due: Timestamp| cursor.is_none_or(|cursor| cursor.due <= due);
        let mut is_needed = is_behind(self.base, horizon);
        for (flow, entry) in &mut self.flows {
            let released = match entry.release(now, &release) {
                Release::All => Some(until),
                Release::Until(due) => Some(due.min(until)),
                Release::Nothing => None,
            };
            entry.scanned_until = released.filter(|until| {
                Some(Cursor::end_of(*until)) > entry.cursor && entry.has_room(flow, window, worthwhile)
            });
            is_needed |= entry
                .scanned_until
                .is_some_and(|until| is_behind(entry.cursor, until.min(horizon)));
        }
        if !is_needed {
            return None;
        }
        // So that no flow uses up what a scan can read.
        let wanting = self.flows.values().filter(|entry| entry.scanned_until.is_some());
        let wanting = wanting.count();
        let positions = self.flows.iter().map(|(flow, entry)| {
            let position = match entry.scanned_until {
                Some(until) => FlowPosition::After {
                    cursor: entry.cursor,
                    until,
                    jobs: window.room_for(flow).clamp(1, (MAX_JOBS / wanting.max(1)).max(1)),
                },
                None => FlowPosition::CountOnly,
            };
            (flow.clone(), position)
        });
        let request = ScanRequest {
            until,
            now,
            after: self.base,
            jobs_per_flow: window
                .room_for_new_flow()
                .clamp(1, (MAX_JOBS / (wanting + 1)).max(1)),
            positions: positions.collect(),
            jobs: MAX_JOBS,
            bytes: MAX_BYTES,
            rotation: self.rotation,
        };
        // Another flow is the first one in the next scan, in case this one is cut off.
        self.rotation = self.rotation.wrapping_add(1);
        self.scan = Some(until);
        Some(request)
    }

    /// The latest due time of the scan in progress.
    pub(super) fn scanned_until(&self) -> Option<Timestamp> {
        self.scan
    }

    /// Begins to load the result of the scan in progress, and moves the positions behind it. `others` are flows whose jobs the index may not contain yet. Each job
    /// of the parts that does not get into the window must be passed to [`LookAhead::rewind`].
    pub(super) fn begin_load(
        &mut self,
        scan: &Scan<ScannedJob>,
        others: &HashSet<&Flow>,
        now: Timestamp,
    ) -> Option<Parts> {
        let until = self.scan.take()?;
        let mut flows = HashMap::new();
        for FlowScan {
            flow,
            first,
            due,
            rows,
            is_complete,
        } in &scan.flows
        {
            let is_new = !self.flows.contains_key(flow);
            let entry = self.entry(flow);
            if is_new {
                entry.scanned_until = Some(until);
            }
            if let Some(parked) = &mut entry.parked {
                (parked.first, parked.due) = (*first, *due);
                if *is_complete {
                    parked.next_check = now.after(CHECK_INTERVAL);
                }
            }
            // `None` if the position of the flow has moved during the scan, because a job before it did not fit. The next scan
            // starts there. Advancing now would skip that job.
            let scanned_until = entry.scanned_until.take();
            let scanned_until = mutant!(
                "shard-skips-jobs-during-a-scan",
                scanned_until,
                scanned_until.or(Some(until))
            );
            let to = match rows.last() {
                _ if *is_complete => scanned_until.map(Cursor::end_of),
                last => last.map(|row| row.cursor).filter(|_| scanned_until.is_some()),
            };
            if let Some(to) = to.filter(|to| Some(*to) > entry.cursor) {
                flows.insert(flow.clone(), entry.advance(to));
            }
        }
        let found: HashSet<&Flow> = scan.flows.iter().map(|found| &found.flow).collect();
        for (flow, entry) in self.flows.iter_mut().filter(|(flow, _)| !found.contains(flow)) {
            if !others.contains(flow) {
                // No jobs wait for the topic any more.
                entry.parked = None;
            }
            if let Some(until) = entry.scanned_until.take() {
                flows.insert(flow.clone(), entry.advance(Cursor::end_of(until)));
            }
        }
        let others = Part {
            after: self.base,
            to: Cursor::end_of(until),
        };
        self.base = self.base.max(Some(others.to));
        Some(Parts { flows, others })
    }

    /// The part that a scan has read of this flow, if any.
    pub(super) fn part_of<'p>(&self, parts: &'p Parts, flow: &Flow) -> Option<&'p Part> {
        match parts.flows.get(flow) {
            None if !self.flows.contains_key(flow) => Some(&parts.others),
            part => part,
        }
    }

    /// Takes note of the first job of a flow for which there is no room.
    pub(super) fn lacks_room(&mut self, flow: &Flow, first: Cursor, window: &Window) {
        self.rewind(flow, first);
        if let Some(entry) = self.flows.get_mut(flow) {
            entry.refused_at = Some(window.departures());
        }
    }

    /// Ends the load. Flows that have been read as far as all others need no entry any more.
    pub(super) fn end_load(&mut self) {
        let base = self.base;
        self.flows
            .retain(|_, entry| entry.parked.is_some() || entry.cursor < base);
    }
}
