//! `redeliver pause`, `resume`, `rate`, `release` and `controls`: what runs, and how fast.

use std::process::ExitCode;

use clap::Args;
use redeliver_client::messages::control::{Desired, Effective};
use redeliver_client::messages::rate_limit::Limit;
use redeliver_client::messages::tier_release_result::Result as Released;
use redeliver_client::messages::{
    ApplicationControl, ChangeControlRequest, Control, ControlFailure, GetControlRequest, PipelineControl,
    RateLimit, ReleaseWholeTierRequest, RunState, SetControlRateRequest, TierControl, TierReleaseResult,
};
use redeliver_client::{ClientError, Code, ControlClient, Endpoint};
use redeliver_core::token_bucket::RATES;
use redeliver_proto::error::code_name;
use redeliver_runtime::cli::CommonArgs;
use redeliver_service::control::ControlName;
use serde_json::json;

use crate::config::Config;
use crate::connection::{
    CONNECTION, CliError, ConnectionArgs, Service, conclude, connect_to_change, inspector, scheduler,
};
use crate::output::{Column, Format, Json, OutputArgs, Text as _, fields, print_item, print_items};

#[derive(Args)]
pub(crate) struct PauseArgs {
    /// app/APPLICATION, pipeline/PIPELINE, tier/PIPELINE/TIER, or tier/TIER for all pipelines
    #[arg(value_name = "NAME")]
    name: ControlName,
    /// Reason for the audit log, at most 1000 bytes
    #[arg(long, value_name = "TEXT")]
    reason: String,
    #[command(flatten)]
    change: ChangeArgs,
}

#[derive(Args)]
pub(crate) struct ResumeArgs {
    /// app/APPLICATION, pipeline/PIPELINE, tier/PIPELINE/TIER, or tier/TIER for all pipelines
    #[arg(value_name = "NAME")]
    name: ControlName,
    /// Return to the pause and the rate of the configuration
    #[arg(long)]
    as_configured: bool,
    /// Reason for the audit log, at most 1000 bytes
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    reason: String,
    #[command(flatten)]
    change: ChangeArgs,
}

#[derive(Args)]
pub(crate) struct RateArgs {
    /// app/APPLICATION, pipeline/PIPELINE, tier/PIPELINE/TIER, or tier/TIER for all pipelines
    #[arg(value_name = "NAME")]
    name: ControlName,
    /// Maximum per second in all processes together; `unlimited`, or `configured`
    #[arg(value_name = "RATE", value_parser = rate)]
    rate: Rate,
    /// Reason for the audit log, at most 1000 bytes
    #[arg(long, value_name = "TEXT")]
    reason: String,
    #[command(flatten)]
    change: ChangeArgs,
}

#[derive(Args)]
pub(crate) struct ReleaseArgs {
    /// tier/PIPELINE/TIER, tier/TIER for all pipelines, or tier/PIPELINE/scheduler for waits in the scheduler
    #[arg(value_name = "NAME")]
    name: ControlName,
    /// Reason for the audit log, at most 1000 bytes
    #[arg(long, value_name = "TEXT")]
    reason: String,
    #[command(flatten)]
    change: ChangeArgs,
}

#[derive(Args)]
pub(crate) struct ControlsArgs {
    /// Show only this one, such as tier/orders/30s
    #[arg(value_name = "NAME")]
    name: Option<ControlName>,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    server: ServerArgs,
}

#[derive(Args)]
struct ChangeArgs {
    /// Fail unless this is the current revision; 0: never changed
    #[arg(long, value_name = "N")]
    expected_revision: Option<u64>,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    server: ServerArgs,
}

/// The scheduler and the inspector serve control.
#[derive(Args)]
struct ServerArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// URL of a scheduler or an inspector; overrides REDELIVER_SCHEDULER and REDELIVER_DLQ (default: from the configuration)
    #[arg(long, value_name = "URL", help_heading = CONNECTION)]
    server: Option<String>,
    #[arg(long, hide = true, env = "REDELIVER_SCHEDULER", hide_env = true)]
    scheduler: Option<String>,
    #[arg(long, hide = true, env = "REDELIVER_DLQ", hide_env = true)]
    inspector: Option<String>,
    #[command(flatten)]
    connection: ConnectionArgs,
}

impl ServerArgs {
    /// Whether to ask an inspector: if only one is known, or if there is no application.
    fn asks_inspector(&self, config: &Config) -> bool {
        match (&self.scheduler, &self.inspector) {
            (None, Some(_)) => true,
            (Some(_), _) => false,
            (None, None) => config.scheduler.apps.is_empty() && config.all_pipelines().next().is_some(),
        }
    }

    async fn connect(&self, config: &Config) -> Result<ControlClient, CliError> {
        let (endpoint, service) = self.endpoint(config)?;
        let connected = ControlClient::connect(&endpoint).await;
        connected.map_err(|error| service.failure(error))
    }

    async fn connect_to_change(&self, config: &Config) -> Result<ControlClient, CliError> {
        let (endpoint, service) = self.endpoint(config)?;
        Ok(ControlClient::new(&connect_to_change(&endpoint, &service).await?))
    }

    fn endpoint(&self, config: &Config) -> Result<(Endpoint, Service), CliError> {
        let (service, url) = if self.asks_inspector(config) {
            (inspector(config), &self.inspector)
        } else {
            (scheduler(config), &self.scheduler)
        };
        let url = self.server.as_deref().or(url.as_deref());
        Ok((self.connection.endpoint(url, &service)?, service))
    }
}

/// A limit; `None`: as the configuration says.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Rate(Option<Limit>);

fn rate(text: &str) -> Result<Rate, String> {
    match text {
        "unlimited" => Ok(Rate(Some(Limit::Unlimited(true)))),
        "configured" => Ok(Rate(None)),
        number => match number.parse() {
            Ok(rate) if RATES.contains(&rate) => Ok(Rate(Some(Limit::PerSecond(rate)))),
            _ => Err("write 0.001 to 1000000, `unlimited` or `configured`".to_owned()),
        },
    }
}

pub(crate) fn pause(args: &PauseArgs) -> ExitCode {
    args.change.run(&args.name, &args.reason, async |client, change| {
        client.pause(change).await
    })
}

pub(crate) fn resume(args: &ResumeArgs) -> ExitCode {
    args.change.run(&args.name, &args.reason, async |client, change| {
        if args.as_configured {
            client.reset(change).await
        } else {
            let resumed = client.resume(change).await?;
            if let Some(rate) = desired(&resumed).rate() {
                eprintln!("the rate stays at {rate}; --as-configured removes it");
            }
            Ok(resumed)
        }
    })
}

pub(crate) fn set_rate(args: &RateArgs) -> ExitCode {
    args.change.run(&args.name, &args.reason, async |client, change| {
        let ChangeControlRequest {
            name,
            reason,
            expected_revision,
        } = change;
        let Rate(limit) = args.rate;
        let request = SetControlRateRequest {
            name,
            rate: limit.map(|limit| RateLimit { limit: Some(limit) }),
            reason,
            expected_revision,
        };
        client.set_rate(request).await
    })
}

pub(crate) fn release(args: &ReleaseArgs) -> ExitCode {
    if let ControlName::WholeTier(_) = args.name {
        return release_whole_tier(args);
    }
    args.change.run(&args.name, &args.reason, async |client, change| {
        client.release(change).await
    })
}

/// Releases the tiers of all pipelines, and prints what became of each.
fn release_whole_tier(args: &ReleaseArgs) -> ExitCode {
    let change = &args.change;
    with_config(&change.server.common, async |config| {
        if change.expected_revision.is_some() {
            let problem = "--expected-revision is not possible with a tier of all pipelines: each of them has a revision of its own";
            return Err(CliError::Usage(problem.to_owned()));
        }
        let client = change.server.connect_to_change(config).await?;
        let request = ReleaseWholeTierRequest {
            name: args.name.to_string(),
            reason: args.reason.clone(),
        };
        let released = client.release_whole_tier(request).await;
        let mut released = released.map_err(|error| failure(&args.name, error))?;
        let mut results = Vec::new();
        let interrupted = loop {
            match released.next().await {
                Ok(Some(result)) => results.push(result),
                Ok(None) => break None,
                Err(error) => break Some(error),
            }
        };
        print_items(change.output.format, &RELEASES, &results, release_json);
        if let Some(error) = interrupted {
            return Err(error.into());
        }
        let failed = results.iter().filter(|result| released_control(result).is_err());
        match failed.count() {
            0 => Ok(ExitCode::SUCCESS),
            failed => Err(CliError::failed(format_args!(
                "{failed} of {} tiers failed; the command can be repeated",
                results.len()
            ))),
        }
    })
}

pub(crate) fn list(args: &ControlsArgs) -> ExitCode {
    with_config(&args.server.common, async |config| {
        let client = args.server.connect(config).await?;
        if let Some(name) = &args.name {
            let request = GetControlRequest {
                name: name.to_string(),
            };
            let control = client.get(request).await;
            let control = control.map_err(|error| failure(name, error))?;
            print_control(args.output.format, &control);
        } else {
            let controls = client.list().await?;
            print_items(args.output.format, &COLUMNS, &controls, as_json);
        }
        Ok(ExitCode::SUCCESS)
    })
}

impl ChangeArgs {
    fn run(
        &self,
        name: &ControlName,
        reason: &str,
        change: impl AsyncFnOnce(&ControlClient, ChangeControlRequest) -> Result<Control, ClientError>,
    ) -> ExitCode {
        with_config(&self.server.common, async |config| {
            let client = self.server.connect_to_change(config).await?;
            let request = ChangeControlRequest {
                name: name.to_string(),
                reason: reason.to_owned(),
                expected_revision: self.expected_revision,
            };
            let changed = change(&client, request).await;
            let control = changed.map_err(|error| failure(name, error))?;
            print_control(self.output.format, &control);
            Ok(ExitCode::SUCCESS)
        })
    }
}

fn with_config(
    common: &CommonArgs,
    run: impl AsyncFnOnce(&Config) -> Result<ExitCode, CliError>,
) -> ExitCode {
    let config: Config = match common.configure(|_| Ok(())) {
        Ok(config) => config,
        Err(code) => return code,
    };
    conclude(run(&config))
}

fn failure(name: &ControlName, error: ClientError) -> CliError {
    match error.code() {
        Some(Code::NotFound) => CliError::failed(format_args!("{name} not found")),
        _ => error.into(),
    }
}

fn print_control(format: Format, control: &Control) {
    print_item(format, || as_text(control), || as_json(control));
}

const COLUMNS: [Column<Control>; 7] = [
    ("name", |control, _| control.name.text()),
    ("state", |control, _| effective(control).state.name()),
    ("rate", |control, _| effective(control).rate_or_default()),
    ("revision", |control, _| control.revision.text()),
    ("changed", |control, _| control.changed_at.text()),
    ("by", |control, _| control.changed_by.text()),
    ("reason", |control, _| {
        control.problem.text().or_else(|| control.reason.text())
    }),
];

/// An effective or desired state, of any kind.
#[derive(Clone, Debug, Default, PartialEq)]
struct Shown {
    state: RunState,
    rate: Option<Limit>,
    /// When what waited was released.
    released_at: Option<String>,
    /// What applies without a rate.
    without_rate: &'static str,
}

impl From<&ApplicationControl> for Shown {
    fn from(app: &ApplicationControl) -> Self {
        Self {
            state: app.state(),
            rate: app.rate.and_then(|rate| rate.limit),
            released_at: None,
            without_rate: "unlimited",
        }
    }
}

impl From<&PipelineControl> for Shown {
    fn from(pipeline: &PipelineControl) -> Self {
        Self {
            state: pipeline.state(),
            rate: pipeline.rate.and_then(|rate| rate.limit),
            released_at: None,
            // Each process has the limit of its own configuration.
            without_rate: "as configured",
        }
    }
}

impl From<&TierControl> for Shown {
    fn from(tier: &TierControl) -> Self {
        Self {
            state: tier.state(),
            rate: tier.rate.and_then(|rate| rate.limit),
            released_at: tier
                .release
                .as_ref()
                .and_then(|release| release.released_at.text()),
            without_rate: "unlimited",
        }
    }
}

/// Whether nothing runs, as far as this version knows.
pub(crate) fn is_paused(control: &Control) -> bool {
    effective(control).state == RunState::Paused
}

/// The effective state.
fn effective(control: &Control) -> Shown {
    match &control.effective {
        Some(Effective::EffectiveApplication(app)) => app.into(),
        Some(Effective::EffectivePipeline(pipeline)) => pipeline.into(),
        Some(Effective::EffectiveTier(tier)) => tier.into(),
        None => Shown::default(),
    }
}

/// The desired state.
fn desired(control: &Control) -> Shown {
    match &control.desired {
        Some(Desired::Application(app)) => app.into(),
        Some(Desired::Pipeline(pipeline)) => pipeline.into(),
        Some(Desired::Tier(tier)) => tier.into(),
        None => Shown::default(),
    }
}

impl Shown {
    fn rate(&self) -> Option<String> {
        self.rate.map(|limit| match limit {
            Limit::PerSecond(rate) => format!("{rate}/s"),
            Limit::Unlimited(_) => "unlimited".to_owned(),
        })
    }

    fn rate_or_default(&self) -> Option<String> {
        self.rate().or_else(|| self.without_rate.text())
    }

    fn to_json(&self) -> Json {
        let rate = match self.rate {
            Some(Limit::PerSecond(rate)) => json!(rate),
            Some(Limit::Unlimited(_)) => json!("unlimited"),
            None => Json::Null,
        };
        let mut json = json!({ "state": self.state.name(), "rate": rate });
        if let Some(at) = &self.released_at {
            json["released_at"] = json!(at);
        }
        json
    }
}

fn as_text(control: &Control) -> String {
    let (effective, desired) = (effective(control), desired(control));
    let missing = if control.desired.is_some() {
        "as configured"
    } else {
        "unreadable"
    };
    let wanted = |text: Option<String>| text.unwrap_or_else(|| missing.to_owned());
    fields(&[
        ("name", &control.name),
        ("state", &effective.state.name()),
        ("rate", &effective.rate_or_default()),
        ("wanted state", &wanted(desired.state.name())),
        ("wanted rate", &wanted(desired.rate())),
        ("released at", &effective.released_at),
        ("revision", &control.revision),
        ("changed at", &control.changed_at),
        ("changed by", &control.changed_by),
        ("reason", &control.reason),
        ("problem", &control.problem),
    ])
}

fn as_json(control: &Control) -> Json {
    json!({
        "name": control.name,
        "revision": control.revision,
        "changed_at": control.changed_at.text(),
        "changed_by": control.changed_by.text(),
        "reason": control.reason.text(),
        "desired": control.desired.is_some().then(|| desired(control).to_json()),
        "effective": effective(control).to_json(),
        "problem": control.problem.text(),
    })
}

/// What a tier has become, or why it was not released, as far as that is known.
fn released_control(result: &TierReleaseResult) -> Result<&Control, ControlFailure> {
    match &result.result {
        Some(Released::Released(control)) => Ok(control),
        Some(Released::Failure(failure)) => Err(failure.clone()),
        // One that this client does not know.
        None => Err(ControlFailure {
            code: Code::Unknown.into(),
            message: "the server says nothing that this version knows".to_owned(),
            ..ControlFailure::default()
        }),
    }
}

const RELEASES: [Column<TierReleaseResult>; 5] = [
    ("name", |result, _| result.name.text()),
    ("result", |result, _| match released_control(result) {
        Ok(_) => "released".text(),
        // The change may have taken effect.
        Err(failure) if Code::from(failure.code) == Code::Unknown => "unknown".text(),
        Err(_) => "failed".text(),
    }),
    ("revision", |result, _| {
        released_control(result).ok()?.revision.text()
    }),
    ("released at", |result, _| {
        effective(released_control(result).ok()?).released_at
    }),
    ("problem", |result, _| {
        released_control(result).err()?.message.text()
    }),
];

fn release_json(result: &TierReleaseResult) -> Json {
    let released = released_control(result);
    let failure = released.as_ref().err().map(|failure| {
        let code = code_name(Code::from(failure.code));
        json!({"code": code, "reason": failure.reason.text(), "message": failure.message})
    });
    json!({"name": result.name, "released": released.ok().map(as_json), "failure": failure})
}

#[cfg(test)]
mod tests {
    use redeliver_client::Timestamp;
    use redeliver_client::convert::to_timestamp;

    use super::*;

    fn row<T>(columns: &[Column<T>], item: &T) -> Vec<String> {
        let now = Timestamp::from_millis(0);
        columns
            .iter()
            .map(|(_, cell)| cell(item, now).unwrap_or_default())
            .collect()
    }

    #[test]
    fn a_control_shows_what_applies() {
        let limit = |limit| Some(RateLimit { limit: Some(limit) });
        let control = Control {
            name: "app/sms".to_owned(),
            revision: 3,
            changed_at: Some(to_timestamp("2026-11-25T01:30:00Z".parse().unwrap())),
            changed_by: "ann".to_owned(),
            reason: "outage".to_owned(),
            desired: Some(Desired::Application(ApplicationControl {
                state: RunState::Paused.into(),
                rate: None,
            })),
            effective: Some(Effective::EffectiveApplication(ApplicationControl {
                state: RunState::Paused.into(),
                rate: limit(Limit::PerSecond(2.5)),
            })),
            problem: String::new(),
        };
        let expected = "\
name          app/sms
state         paused
rate          2.5/s
wanted state  paused
wanted rate   as configured
revision      3
changed at    2026-11-25T01:30:00.000Z
changed by    ann
reason        outage
";
        assert_eq!(as_text(&control), expected);
        let expected = [
            "app/sms",
            "paused",
            "2.5/s",
            "3",
            "2026-11-25T01:30:00.000Z",
            "ann",
            "outage",
        ];
        assert_eq!(row(&COLUMNS, &control), expected);
        let value = as_json(&control);
        assert_eq!(value["desired"], json!({"state": "paused", "rate": null}));
        assert_eq!(value["effective"], json!({"state": "paused", "rate": 2.5}));
    }

    #[test]
    fn unreadable_controls_show_their_problem() {
        let problem = "has an unknown state, and is paused until it can be read";
        let control = Control {
            name: "app/sms".to_owned(),
            effective: Some(Effective::EffectiveApplication(ApplicationControl {
                state: RunState::Paused.into(),
                rate: None,
            })),
            problem: problem.to_owned(),
            ..Control::default()
        };
        let text = as_text(&control);
        assert!(text.contains("wanted state  unreadable\n"), "{text}");
        assert!(text.ends_with(&format!("problem       {problem}\n")), "{text}");
        assert_eq!(row(&COLUMNS, &control)[6], problem);
        let value = as_json(&control);
        assert_eq!(
            (&value["desired"], &value["problem"]),
            (&Json::Null, &json!(problem))
        );
    }

    #[test]
    fn a_pipeline_rate_defaults_to_configuration() {
        let control = |rate: Option<Limit>| Control {
            name: "pipeline/docs".to_owned(),
            effective: Some(Effective::EffectivePipeline(PipelineControl {
                state: RunState::Running.into(),
                rate: rate.map(|limit| RateLimit { limit: Some(limit) }),
            })),
            ..Control::default()
        };
        for (rate, expected) in [
            (None, "as configured"),
            (Some(Limit::PerSecond(0.5)), "0.5/s"),
            (Some(Limit::Unlimited(true)), "unlimited"),
        ] {
            let control = control(rate);
            let text = as_text(&control);
            assert!(text.contains(&format!("\nrate          {expected}\n")), "{text}");
            assert_eq!(row(&COLUMNS, &control)[2], expected);
        }
    }

    #[test]
    fn each_released_tier_has_a_result() {
        let name = "tier/docs/30s";
        let result = |result| TierReleaseResult {
            name: name.to_owned(),
            result: Some(result),
        };
        let at = "2026-11-25T01:30:00.000Z";
        let released = result(Released::Released(Control {
            name: name.to_owned(),
            revision: 4,
            effective: Some(Effective::EffectiveTier(TierControl {
                release: Some(redeliver_client::messages::TierRelease {
                    released_at: Some(to_timestamp(at.parse().unwrap())),
                    ..Default::default()
                }),
                ..TierControl::default()
            })),
            ..Control::default()
        }));
        assert_eq!(row(&RELEASES, &released), [name, "released", "4", at, ""]);
        let json = release_json(&released);
        assert_eq!(
            (&json["released"]["revision"], &json["failure"]),
            (&json!(4), &Json::Null)
        );
        for (code, outcome) in [(Code::Unavailable, "failed"), (Code::Unknown, "unknown")] {
            let failed = result(Released::Failure(ControlFailure {
                code: code.into(),
                reason: "KAFKA_UNAVAILABLE".to_owned(),
                message: "no answer".to_owned(),
            }));
            assert_eq!(row(&RELEASES, &failed), [name, outcome, "", "", "no answer"]);
            let expected =
                json!({"code": code_name(code), "reason": "KAFKA_UNAVAILABLE", "message": "no answer"});
            assert_eq!(release_json(&failed)["failure"], expected);
        }
    }

    #[test]
    fn a_tier_shows_its_release() {
        let control = |name: &str, effective| Control {
            name: name.to_owned(),
            effective: Some(effective),
            ..Control::default()
        };
        let state = RunState::Paused.into();
        let released_at = Some(to_timestamp("2026-11-25T01:30:00Z".parse().unwrap()));
        let tier = control(
            "tier/docs/30s",
            Effective::EffectiveTier(TierControl {
                state,
                rate: None,
                release: Some(redeliver_client::messages::TierRelease {
                    released_at,
                    ..Default::default()
                }),
            }),
        );
        let at = "2026-11-25T01:30:00.000Z";
        assert!(
            as_text(&tier).contains(&format!("released at   {at}\n")),
            "{}",
            as_text(&tier)
        );
        let expected = json!({"state": "paused", "rate": null, "released_at": at});
        assert_eq!(as_json(&tier)["effective"], expected);
    }

    #[test]
    fn rates_are_numbers_or_words() {
        assert_eq!(rate("0.5"), Ok(Rate(Some(Limit::PerSecond(0.5)))));
        assert_eq!(rate("unlimited"), Ok(Rate(Some(Limit::Unlimited(true)))));
        assert_eq!(rate("configured"), Ok(Rate(None)));
        for text in ["", "0", "-1", "NaN", "inf", "fast"] {
            assert!(rate(text).is_err(), "{text}");
        }
    }
}
