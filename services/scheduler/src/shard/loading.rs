//! Moves jobs from the index to the window, as far as the [`LookAhead`](super::look_ahead::LookAhead) asks for them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use redeliver_core::Timestamp;

use super::look_ahead::Release;
use super::{Obstacle, SCAN_OVERLAY_FACTOR, Shard};
use crate::index::{Cursor, Scan};
use crate::index_messages::{IndexRequest, ScannedJob};
use crate::job::{Flow, Job};
use crate::topics::Presence;
use crate::window::Inserted;

impl Shard {
    pub(super) fn request_scan(&mut self, now: Timestamp) -> Option<IndexRequest> {
        if self.is_index_behind(SCAN_OVERLAY_FACTOR) {
            return None;
        }
        let (settings, apps) = (&self.settings, &self.apps);
        let presence = |obstacle: &Obstacle| match obstacle {
            Obstacle::UnavailableTopic((topic, _)) => settings.topics.presence(topic),
            Obstacle::Paused(app) if apps.is_paused(app) => Presence::Unknown,
            Obstacle::Paused(_) => Presence::Exists,
        };
        let release = |obstacle: &Obstacle| match presence(obstacle) {
            Presence::Exists => Release::All,
            Presence::Missing { lasting } if settings.is_confirmed_missing(lasting) => {
                let timeout = i64::try_from(settings.missing_topic_timeout.as_millis()).unwrap_or(i64::MAX);
                Release::Until(Timestamp::from_millis(now.as_millis().saturating_sub(timeout)))
            }
            Presence::Missing { .. } | Presence::Unwritable { .. } | Presence::Unknown => Release::Nothing,
        };
        let request = self
            .look_ahead
            .request(now, settings.window, &self.window, release);
        request.map(IndexRequest::Scan)
    }

    /// Moves the jobs that a scan has found to the window, as far as there is room. The overlay takes precedence over the index.
    pub(super) fn load(&mut self, scan: Scan<ScannedJob>, now: Timestamp) {
        let Some(until) = self.look_ahead.scanned_until() else {
            return;
        };
        let in_overlay = self.overlay.scheduled().filter(|job| job.due <= until);
        let in_overlay: Vec<(Flow, Arc<Job>)> = in_overlay.map(|job| (Flow::of(job), job.clone())).collect();
        let flows = in_overlay.iter().map(|(flow, _)| flow).collect();
        let Some(parts) = self.look_ahead.begin_load(&scan, &flows, now) else {
            return;
        };
        let mut found: HashMap<Flow, BTreeMap<Cursor, Arc<Job>>> = HashMap::new();
        for (flow, job) in in_overlay {
            let cursor = Cursor::of(&job);
            let part = self.look_ahead.part_of(&parts, &flow);
            let is_in_part = part.is_some_and(|part| part.contains(cursor));
            if is_in_part && self.window.get(job.id).is_none() {
                found.entry(flow).or_default().insert(cursor, job);
            }
        }
        for scanned in scan.flows {
            let Some(part) = self.look_ahead.part_of(&parts, &scanned.flow) else {
                continue;
            };
            for ScannedJob { cursor, job } in scanned.rows {
                let id = cursor.id;
                if !part.contains(cursor) || self.overlay.job(id).is_some() || self.window.get(id).is_some() {
                    continue;
                }
                let jobs = found.entry(scanned.flow.clone()).or_default();
                jobs.insert(cursor, job);
            }
        }
        for (flow, jobs) in found {
            self.load_flow(&flow, jobs);
        }
        self.look_ahead.end_load();
    }

    /// Moves jobs of one flow to the window, up to the first one for which there is no room.
    fn load_flow(&mut self, flow: &Flow, jobs: BTreeMap<Cursor, Arc<Job>>) {
        for (cursor, job) in jobs {
            if !self.keep_in_window(job) {
                return self.look_ahead.lacks_room(flow, cursor, &self.window);
            }
        }
    }

    /// Adds a job to the window if there is room. Jobs that made room are read again.
    pub(super) fn keep_in_window(&mut self, job: Arc<Job>) -> bool {
        let Inserted { fits, evicted } = self.window.insert(job);
        for job in evicted {
            self.look_ahead.rewind(&Flow::of(&job), Cursor::of(&job));
        }
        fits
    }
}
