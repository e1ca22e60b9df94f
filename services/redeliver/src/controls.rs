//! `redeliver pause`, `resume`, `rate` and `controls`: what runs, and how fast.

use std::process::ExitCode;

use clap::Args;
use redeliver_client::messages::control::{Desired, Effective};
use redeliver_client::messages::rate_limit::Limit;
use redeliver_client::messages::{ApplicationControl, Control, RunState};
use redeliver_client::{ClientError, Code, ControlChange, ControlClient, RateLimit};
use redeliver_core::Timestamp;
use redeliver_proto::convert::from_timestamp;
use redeliver_runtime::Config;
use redeliver_runtime::cli::{CommonArgs, report};
use redeliver_service::control::ControlName;
use serde_json::{Value, json};

use crate::connection::{CliError, conclude, scheduler};
use crate::jobs::SchedulerArgs;
use crate::output::{Format, OutputArgs, fields, print_item, print_items};

#[derive(Args)]
pub(crate) struct PauseArgs {
    /// What to pause, such as app/sms
    #[arg(value_name = "NAME")]
    name: ControlName,
    /// Why, for others; at most 1000 bytes
    #[arg(long, value_name = "TEXT")]
    why: String,
    #[command(flatten)]
    change: ChangeArgs,
}

#[derive(Args)]
pub(crate) struct ResumeArgs {
    /// What to resume, such as app/sms
    #[arg(value_name = "NAME")]
    name: ControlName,
    /// Return to the configuration, also with the rate
    #[arg(long)]
    as_configured: bool,
    /// Why, for others; at most 1000 bytes
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    why: String,
    #[command(flatten)]
    change: ChangeArgs,
}

#[derive(Args)]
pub(crate) struct RateArgs {
    /// What to limit, such as app/sms
    #[arg(value_name = "NAME")]
    name: ControlName,
    /// How many per second at most, by all processes together; `unlimited`, or `configured`
    #[arg(value_name = "RATE", value_parser = rate)]
    rate: RateLimit,
    /// Why, for others; at most 1000 bytes
    #[arg(long, value_name = "TEXT")]
    why: String,
    #[command(flatten)]
    change: ChangeArgs,
}

#[derive(Args)]
pub(crate) struct ControlsArgs {
    /// Show only this one, such as app/sms
    #[arg(value_name = "NAME")]
    name: Option<ControlName>,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    scheduler: SchedulerArgs,
}

#[derive(Args)]
struct ChangeArgs {
    /// Fail unless it has this revision; 0: nobody has changed it yet
    #[arg(long, value_name = "N")]
    expected_revision: Option<u64>,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    scheduler: SchedulerArgs,
}

fn rate(text: &str) -> Result<RateLimit, String> {
    match text {
        "unlimited" => Ok(RateLimit::Unlimited),
        "configured" => Ok(RateLimit::Configured),
        number => match number.parse() {
            Ok(rate) if (0.001..=1_000_000.0).contains(&rate) => Ok(RateLimit::PerSecond(rate)),
            _ => Err("write 0.001 to 1000000, `unlimited` or `configured`".to_owned()),
        },
    }
}

pub(crate) fn pause(args: &PauseArgs) -> ExitCode {
    args.change.run(&args.name, &args.why, async |client, change| {
        client.pause(change).await
    })
}

pub(crate) fn resume(args: &ResumeArgs) -> ExitCode {
    args.change.run(&args.name, &args.why, async |client, change| {
        if args.as_configured {
            client.reset(change).await
        } else {
            client.resume(change).await
        }
    })
}

pub(crate) fn set_rate(args: &RateArgs) -> ExitCode {
    args.change.run(&args.name, &args.why, async |client, change| {
        client.set_rate(change, args.rate).await
    })
}

pub(crate) fn list(args: &ControlsArgs) -> ExitCode {
    with_config(&args.scheduler.common, async |config| {
        let client = connect(&args.scheduler, config).await?;
        if let Some(name) = &args.name {
            let control = client
                .get(&name.to_string())
                .await
                .map_err(|error| failure(name, error))?;
            print_control(args.output.format, &control);
        } else {
            let controls = client.list().await?;
            print_items(args.output.format, &COLUMNS, &controls, row, as_json);
        }
        Ok(ExitCode::SUCCESS)
    })
}

impl ChangeArgs {
    fn run(
        &self,
        name: &ControlName,
        why: &str,
        change: impl AsyncFnOnce(&ControlClient, &ControlChange) -> Result<Control, ClientError>,
    ) -> ExitCode {
        with_config(&self.scheduler.common, async |config| {
            let client = connect(&self.scheduler, config).await?;
            let request = ControlChange {
                name: name.to_string(),
                why: why.to_owned(),
                expected_revision: self.expected_revision,
            };
            let changed = change(&client, &request).await;
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
    let config = match common.load() {
        Ok(config) => config,
        Err(error) => return report(&error),
    };
    if let Some(code) = common.handle_config_flags(&config, |_| Ok(())) {
        return code;
    }
    conclude(run(&config))
}

async fn connect(scheduler_args: &SchedulerArgs, config: &Config) -> Result<ControlClient, CliError> {
    let service = scheduler(config);
    let endpoint = scheduler_args.endpoint(&service)?;
    let connected = ControlClient::connect(&endpoint).await;
    connected.map_err(|error| service.failure(error))
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

const COLUMNS: [&str; 7] = ["name", "state", "rate", "revision", "changed", "by", "why"];

/// What applies.
fn effective(control: &Control) -> ApplicationControl {
    match &control.effective {
        Some(Effective::EffectiveApplication(app)) => *app,
        None => ApplicationControl::default(),
    }
}

/// What is wanted.
fn desired(control: &Control) -> ApplicationControl {
    match &control.desired {
        Some(Desired::Application(app)) => *app,
        None => ApplicationControl::default(),
    }
}

fn state(app: &ApplicationControl) -> Option<&'static str> {
    match app.state() {
        RunState::Unspecified => None,
        RunState::Running => Some("running"),
        RunState::Paused => Some("paused"),
    }
}

fn rate_of(app: &ApplicationControl) -> Option<String> {
    app.rate.as_ref()?.limit.map(|limit| match limit {
        Limit::PerSecond(rate) => format!("{rate}/s"),
        Limit::Unlimited(_) => "unlimited".to_owned(),
    })
}

fn rate_json(app: &ApplicationControl) -> Value {
    match app.rate.as_ref().and_then(|rate| rate.limit) {
        Some(Limit::PerSecond(rate)) => json!(rate),
        Some(Limit::Unlimited(_)) => json!("unlimited"),
        None => Value::Null,
    }
}

fn changed_at(control: &Control) -> Option<Timestamp> {
    from_timestamp(control.changed_at.as_ref()?)
}

fn some(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

fn row(control: &Control) -> Vec<String> {
    let app = effective(control);
    vec![
        control.name.clone(),
        state(&app).unwrap_or_default().to_owned(),
        rate_of(&app).unwrap_or_else(|| "unlimited".to_owned()),
        control.revision.to_string(),
        changed_at(control)
            .map(|time| time.to_string())
            .unwrap_or_default(),
        control.changed_by.clone(),
        some(&control.problem).unwrap_or_else(|| control.why.clone()),
    ]
}

fn as_text(control: &Control) -> String {
    let (effective, desired) = (effective(control), desired(control));
    let missing = if control.desired.is_some() {
        "as configured"
    } else {
        "unreadable"
    };
    let wanted = |text: Option<String>| text.or_else(|| Some(missing.to_owned()));
    fields(&[
        ("name", Some(control.name.clone())),
        ("state", state(&effective).map(str::to_owned)),
        (
            "rate",
            rate_of(&effective).or_else(|| Some("unlimited".to_owned())),
        ),
        ("wanted state", wanted(state(&desired).map(str::to_owned))),
        ("wanted rate", wanted(rate_of(&desired))),
        ("revision", Some(control.revision.to_string())),
        ("changed at", changed_at(control).map(|time| time.to_string())),
        ("changed by", some(&control.changed_by)),
        ("why", some(&control.why)),
        ("problem", some(&control.problem)),
    ])
}

fn as_json(control: &Control) -> Value {
    let state_json = |app: ApplicationControl| json!({ "state": state(&app), "rate": rate_json(&app) });
    json!({
        "name": control.name,
        "revision": control.revision,
        "changed_at": changed_at(control).map(|time| time.to_string()),
        "changed_by": some(&control.changed_by),
        "why": some(&control.why),
        "desired": control.desired.is_some().then(|| state_json(desired(control))),
        "effective": state_json(effective(control)),
        "problem": some(&control.problem),
    })
}

#[cfg(test)]
mod tests {
    use redeliver_client::messages::RateLimit as ProtoRate;
    use redeliver_proto::convert::to_timestamp;

    use super::*;

    #[test]
    fn a_control_is_shown_with_what_applies_and_what_is_wanted() {
        let limit = |limit| Some(ProtoRate { limit: Some(limit) });
        let control = Control {
            name: "app/sms".to_owned(),
            revision: 3,
            changed_at: Some(to_timestamp("2026-11-25T01:30:00Z".parse().unwrap())),
            changed_by: "ann".to_owned(),
            why: "outage".to_owned(),
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
why           outage
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
        assert_eq!(row(&control), expected);
        let value = as_json(&control);
        assert_eq!(value["desired"], json!({"state": "paused", "rate": null}));
        assert_eq!(value["effective"], json!({"state": "paused", "rate": 2.5}));
    }

    #[test]
    fn what_cannot_be_read_is_shown_with_its_problem() {
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
        assert_eq!(row(&control)[6], problem);
        let value = as_json(&control);
        assert_eq!(
            (&value["desired"], &value["problem"]),
            (&Value::Null, &json!(problem))
        );
    }

    #[test]
    fn a_rate_is_a_number_or_a_word() {
        assert_eq!(rate("0.5"), Ok(RateLimit::PerSecond(0.5)));
        assert_eq!(rate("unlimited"), Ok(RateLimit::Unlimited));
        assert_eq!(rate("configured"), Ok(RateLimit::Configured));
        for text in ["", "0", "-1", "NaN", "inf", "fast"] {
            assert!(rate(text).is_err(), "{text}");
        }
    }
}
