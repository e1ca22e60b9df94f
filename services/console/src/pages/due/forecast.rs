//! When what is due leaves, with rates and pauses applied. No IO.
//!
//! What becomes due in a minute is spread over it, and leaves as soon as the rate permits.

use std::collections::BTreeMap;
use std::time::Duration;

use redeliver_client::messages::{Control, RunState, Stats, WaitingPlace, rate_limit};

use crate::pages::act::effective;

/// The longest time that is told.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 86_400);
const MINUTE: f64 = 60.0;

#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub(crate) enum Limit {
    #[default]
    None,
    PerSecond(f64),
    Paused,
}

/// What applies, by the names of controls. What has no name runs as configured, without a rate.
#[derive(Debug, Default)]
pub(crate) struct Limits(BTreeMap<String, Limit>);

impl Limits {
    pub(crate) fn of(controls: &[Control]) -> Self {
        let limits = controls.iter().map(|control| {
            let limit = match effective(control) {
                (RunState::Paused, _) => Limit::Paused,
                (_, Some(rate_limit::Limit::PerSecond(rate))) if rate > 0.0 => Limit::PerSecond(rate),
                _ => Limit::None,
            };
            (control.name.clone(), limit)
        });
        Self(limits.filter(|(_, limit)| *limit != Limit::None).collect())
    }

    fn get(&self, name: &str) -> Limit {
        self.0.get(name).copied().unwrap_or_default()
    }

    /// The stricter one of the limits of a tier and of this tier of all pipelines.
    fn tier(&self, pipeline: &str, tier: &str) -> Limit {
        let (own, of_all) = (
            self.get(&format!("tier/{pipeline}/{tier}")),
            self.get(&format!("tier/{tier}")),
        );
        match (own, of_all) {
            (Limit::PerSecond(own), Limit::PerSecond(of_all)) => Limit::PerSecond(own.min(of_all)),
            _ if own > of_all => own,
            _ => of_all,
        }
    }

    /// The applications that are paused or have a rate.
    pub(crate) fn apps(&self) -> impl Iterator<Item = (&str, Limit)> {
        let named = self.0.iter().map(|(name, limit)| (name.as_str(), *limit));
        named.filter_map(|(name, limit)| Some((name.strip_prefix("app/")?, limit)))
    }
}

/// What waits in one place, and the limit with which it leaves.
#[derive(Clone, Debug, Default)]
pub(crate) struct Flow {
    /// The name of a control, such as `app/sms`.
    pub(crate) name: String,
    pub(crate) limit: Limit,
    /// How many are due already.
    pub(crate) due: u64,
    /// How many become due in each of the next minutes.
    pub(crate) per_minute: Vec<u64>,
}

/// Until when a limit holds it up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum End {
    /// Everything leaves within the minute in which it is due.
    OnTime,
    /// So many need so long from now: the largest number that the rate holds up together.
    After(u64, Duration),
    /// So many need so long, which is after the last minute, and longer if more become due then.
    AtLeast(u64, Duration),
    Never,
}

impl Flow {
    pub(crate) fn of_jobs(name: &str, limit: Limit, stats: &Stats) -> Self {
        Self {
            name: name.to_owned(),
            limit,
            due: stats.due,
            per_minute: stats.per_minute.clone(),
        }
    }

    fn of_place(place: &WaitingPlace, limits: &Limits) -> Self {
        let counts = place.counts.clone().unwrap_or_default();
        Self {
            name: format!("tier/{}/{}", place.pipeline, place.place),
            limit: limits.tier(&place.pipeline, &place.place),
            due: counts.overdue,
            per_minute: counts.forecast.unwrap_or_default().per_minute,
        }
    }

    /// How many are due at the end of the last minute.
    pub(crate) fn total(&self) -> u64 {
        self.per_minute
            .iter()
            .fold(self.due, |sum, due| sum.saturating_add(*due))
    }

    /// Takes a part away.
    pub(crate) fn remove(&mut self, part: &Self) {
        self.due = self.due.saturating_sub(part.due);
        for (all, part) in self.per_minute.iter_mut().zip(&part.per_minute) {
            *all = all.saturating_sub(*part);
        }
    }

    /// How many leave in each minute, and until when the limit holds them up.
    pub(crate) fn outflow(&self) -> (Vec<u64>, End) {
        match self.limit {
            Limit::Paused if self.total() > 0 => (vec![0; self.per_minute.len()], End::Never),
            Limit::PerSecond(rate) => self.at(rate),
            Limit::None | Limit::Paused => {
                let mut per_minute = self.per_minute.clone();
                if let Some(first) = per_minute.first_mut() {
                    *first = first.saturating_add(self.due);
                }
                (per_minute, End::OnTime)
            }
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    fn at(&self, rate: f64) -> (Vec<u64>, End) {
        // An idle rate saves up a second's worth, and at least one. What is due already has used it up.
        let most_saved = rate.max(1.0);
        let mut saved = if self.due == 0 { most_saved } else { 0.0 };
        // Since `since`, with what was saved then, something is held up: `left` of it at `now`.
        let (mut left, mut since, mut now) = (self.due as f64, (0.0, saved), 0.0);
        let (mut sent, mut shown) = (0.0, 0);
        let (mut per_minute, mut end, mut most) = (Vec::new(), End::OnTime, 0);
        for due in &self.per_minute {
            let (due, can) = (*due as f64, rate * MINUTE + saved);
            sent += can.min(left + due);
            // Fractions are carried, so that the sum is right.
            per_minute.push(whole(sent) - shown);
            shown = whole(sent);
            if left + due <= can {
                let ends = now + left / (rate - due / MINUTE).max(f64::MIN_POSITIVE);
                let held_up = whole(rate * (ends - since.0) + since.1);
                if left > 0.0 && held_up > most {
                    (end, most) = (End::After(held_up, wait(ends)), held_up);
                }
                saved = most_saved.min(can - left - due);
                since = (now + MINUTE, saved);
            } else {
                saved = 0.0;
            }
            left = (left + due - can).max(0.0);
            now += MINUTE;
        }
        if left > 0.0 {
            end = End::AtLeast(
                whole(rate * (now - since.0) + since.1 + left),
                wait(now + left / rate),
            );
        }
        (per_minute, end)
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "saturates"
)]
fn whole(number: f64) -> u64 {
    number.round() as u64
}

fn wait(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).map_or(FOREVER, |wait| wait.min(FOREVER))
}

/// The places where retries wait, each pipeline that has a limit, and how many attempts start in each minute: what leaves a place goes to the workers of its
/// pipeline, which have a limit of their own.
pub(crate) fn retries(places: &[WaitingPlace], limits: &Limits, minutes: usize) -> (Vec<Flow>, Vec<u64>) {
    let (mut flows, mut per_minute) = (Vec::new(), vec![0; minutes]);
    let mut pipelines: BTreeMap<&str, Flow> = BTreeMap::new();
    for place in places {
        let flow = Flow::of_place(place, limits);
        let name = format!("pipeline/{}", place.pipeline);
        let workers = pipelines.entry(&place.pipeline).or_insert_with(|| Flow {
            limit: limits.get(&name),
            name,
            due: 0,
            per_minute: vec![0; minutes],
        });
        if place.place == "due" {
            // Nothing but the workers holds it up.
            workers.due = workers.due.saturating_add(flow.due);
        } else {
            add(&mut workers.per_minute, &flow.outflow().0);
            flows.push(flow);
        }
    }
    for workers in pipelines.into_values() {
        add(&mut per_minute, &workers.outflow().0);
        if workers.limit != Limit::None {
            flows.push(workers);
        }
    }
    (flows, per_minute)
}

pub(crate) fn add(sums: &mut [u64], numbers: &[u64]) {
    for (sum, number) in sums.iter_mut().zip(numbers) {
        *sum = sum.saturating_add(*number);
    }
}

#[cfg(test)]
mod tests {
    use redeliver_client::messages::control::Effective;
    use redeliver_client::messages::{
        ApplicationControl, PipelineControl, RateLimit, TierControl, WaitingCounts, WaitingForecast,
    };

    use super::*;

    fn flow(limit: Limit, due: u64, per_minute: &[u64]) -> Flow {
        Flow {
            limit,
            due,
            per_minute: per_minute.to_vec(),
            ..Flow::default()
        }
    }

    #[test]
    fn rates_and_pauses_hold_up() {
        use End::{After, AtLeast, Never, OnTime};
        use Limit::{None, Paused, PerSecond};
        let after = Duration::from_secs;
        for (limit, due, per_minute, leaves, end) in [
            (None, 7, &[1, 2][..], &[8, 2][..], OnTime),
            (Paused, 0, &[0, 0], &[0, 0], OnTime),
            (Paused, 7, &[1, 2], &[0, 0], Never),
            // These 1,800 need six minutes at 5/s.
            (
                PerSecond(5.0),
                1_800,
                &[0; 7],
                &[300, 300, 300, 300, 300, 300, 0],
                After(1_800, after(360)),
            ),
            (
                PerSecond(5.0),
                0,
                &[0, 1_800, 0, 0, 0, 0, 0, 9],
                &[0, 305, 300, 300, 300, 300, 295, 9],
                After(1_800, after(419)),
            ),
            // What becomes due while it is held up is held up, too.
            (
                PerSecond(1.0),
                60,
                &[30, 0, 30],
                &[60, 30, 30],
                After(90, after(90)),
            ),
            (PerSecond(1.0), 0, &[60, 60], &[60, 60], OnTime),
            // The larger one of two.
            (
                PerSecond(1.0),
                30,
                &[0, 90, 30, 0],
                &[30, 61, 59, 0],
                After(119, after(178)),
            ),
            (PerSecond(1.0), 300, &[0, 60], &[60, 60], AtLeast(360, after(360))),
            (PerSecond(0.001), 0, &[0, 1], &[0, 1], OnTime),
            (PerSecond(0.01), 3, &[0; 4], &[1, 0, 1, 0], AtLeast(3, after(300))),
            (
                PerSecond(0.001),
                u64::MAX,
                &[u64::MAX],
                &[0],
                AtLeast(u64::MAX, FOREVER),
            ),
        ] {
            let outflow = flow(limit, due, per_minute).outflow();
            assert_eq!(outflow, (leaves.to_vec(), end), "{limit:?} {due} {per_minute:?}");
        }
    }

    fn control(name: &str, effective: Effective) -> Control {
        Control {
            name: name.to_owned(),
            effective: Some(effective),
            ..Control::default()
        }
    }

    fn per_second(rate: f64) -> Option<RateLimit> {
        Some(RateLimit {
            limit: Some(rate_limit::Limit::PerSecond(rate)),
        })
    }

    fn tier(name: &str, rate: f64, state: RunState) -> Control {
        let tier = TierControl {
            state: state.into(),
            rate: per_second(rate),
            ..TierControl::default()
        };
        control(name, Effective::EffectiveTier(tier))
    }

    #[test]
    fn lower_limit_of_two_applies() {
        let app = ApplicationControl {
            state: RunState::Running.into(),
            rate: per_second(5.0),
        };
        let limits = Limits::of(&[
            tier("tier/30s", 2.0, RunState::Running),
            tier("tier/docs/30s", 3.0, RunState::Running),
            tier("tier/mail/30s", 1.0, RunState::Running),
            tier("tier/1h", 1.0, RunState::Paused),
            tier("tier/docs/1h", 9.0, RunState::Running),
            control("app/sms", Effective::EffectiveApplication(app)),
        ]);
        for (pipeline, place, expected) in [
            ("docs", "30s", Limit::PerSecond(2.0)),
            ("mail", "30s", Limit::PerSecond(1.0)),
            ("docs", "1h", Limit::Paused),
            ("docs", "scheduler", Limit::None),
        ] {
            assert_eq!(limits.tier(pipeline, place), expected, "{pipeline} {place}");
        }
        let apps: Vec<(&str, Limit)> = limits.apps().collect();
        assert_eq!(apps, [("sms", Limit::PerSecond(5.0))]);
    }

    fn place(pipeline: &str, place: &str, overdue: u64, per_minute: &[u64]) -> WaitingPlace {
        let forecast = WaitingForecast {
            per_minute: per_minute.to_vec(),
            later: 0,
        };
        WaitingPlace {
            pipeline: pipeline.to_owned(),
            place: place.to_owned(),
            counts: Some(WaitingCounts {
                overdue,
                forecast: Some(forecast),
                ..WaitingCounts::default()
            }),
        }
    }

    #[test]
    fn retries_pass_tiers_and_workers() {
        let workers = PipelineControl {
            state: RunState::Running.into(),
            rate: per_second(0.5),
        };
        let limits = Limits::of(&[
            tier("tier/docs/30s", 1.0, RunState::Running),
            control("pipeline/docs", Effective::EffectivePipeline(workers)),
        ]);
        let places = [
            place("docs", "due", 10, &[0, 0, 0]),
            place("docs", "30s", 90, &[0, 0, 0]),
            place("mail", "30s", 1, &[2, 3, 4]),
        ];
        let (flows, per_minute) = retries(&places, &limits, 3);
        // 60 and 30 leave the tier, and 30 a minute start. The other pipeline has no limit.
        assert_eq!(per_minute, [30 + 3, 30 + 3, 30 + 4]);
        let names: Vec<&str> = flows.iter().map(|flow| flow.name.as_str()).collect();
        assert_eq!(names, ["tier/docs/30s", "tier/mail/30s", "pipeline/docs"]);
        assert_eq!(flows[2].outflow().1, End::AtLeast(100, Duration::from_secs(200)));
    }
}
