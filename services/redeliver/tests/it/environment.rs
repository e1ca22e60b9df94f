//! Settings from the environment: those of real processes, and those that the compose file reads from `.env`.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use redeliver_testkit::{ServiceProcess, binary, redis_url, run};
use serde_json::Value;

use crate::deployment::deploy;
use crate::docs::repository;
use crate::retries::drafts;
use crate::support::{DEADLINE, PLAN, PipeBuilder, SERVICES};

/// The name of the variable for a setting.
fn variable(key: &str) -> String {
    let levels = key.split('.').map(|level| level.to_uppercase().replace('-', "_"));
    format!("REDELIVER__{}", levels.collect::<Vec<_>>().join("__"))
}

/// The file has only addresses at which nothing listens.
#[test]
fn variables_override_file_in_services() {
    let pipe = PipeBuilder::new("environment")
        .tiers(&[300])
        .through_scheduler()
        .with_inspector()
        .plan(PLAN)
        .pipeline("http.timeout", "10s")
        .create();
    let (brokers, redis, url) = (pipe.env.brokers(), redis_url(), pipe.endpoint.url());
    let nowhere = pipe.env.yaml().replace(brokers, "127.0.0.1:1");
    let nowhere = nowhere
        .replace(&redis, "redis://127.0.0.1:1")
        .replace(&url, "http://127.0.0.1:1");
    let file = pipe.env.with_yaml(&nowhere);
    let url = format!("{url}/records");
    let pipeline = format!("pipelines.{}", pipe.name());
    let mut environment: BTreeMap<String, String> = [
        ("kafka.brokers", brokers),
        // A property has dots in its name.
        ("kafka.properties.compression-type", "gzip"),
        ("redis.url", &redis),
        (&format!("{pipeline}.http.url"), &url),
        ("admin.listen", "127.0.0.1:0"),
    ]
    .map(|(key, value)| (variable(key), value.to_owned()))
    .into();
    environment.extend(
        pipe.env
            .settings()
            .iter()
            .map(|(key, value)| (variable(key), value.clone())),
    );
    environment.insert("REDELIVER_CONFIG".to_owned(), file.file().display().to_string());
    let command = |program: &str| -> Command {
        let mut command = binary(program);
        command.env_clear().envs(&environment);
        command.env(variable("instance"), format!("{}-a", pipe.name()));
        command
    };

    let printed = run({
        let mut command = command("enricher");
        command.arg("--print-config");
        command
    });
    for line in ["    compression.type: gzip\n", &format!("url: {url}\n")] {
        assert!(printed.stdout.contains(line), "{printed:?}");
    }

    let started = SERVICES.map(|service| {
        let environment = environment.clone();
        let instance = format!("{}-a", pipe.name());
        let mut process = ServiceProcess::spawn(service, move || {
            let mut command = binary(service);
            command.env_clear().envs(&environment);
            command.env(variable("instance"), &instance);
            command
        });
        process.until_ready();
        process
    });
    let sent = pipe.produce(drafts("environment", 40));
    pipe.settle(&sent, DEADLINE).meets(&PLAN, &sent);
    let audited = run({
        let mut command = command("redeliver");
        command.args(["audit", "--pipeline", pipe.name()]);
        command
    });
    assert_eq!(audited.code, Some(0), "{audited:?}");
    for mut process in started {
        process.shut_down();
    }
}

#[test]
fn invalid_variable_is_named() {
    let expected =
        "error: kafka.lanes: `many` is not a whole number (environment variable REDELIVER__KAFKA__LANES)\n";
    let arguments = [("redeliver", &["topics", "apply"][..])];
    for (program, arguments) in SERVICES
        .map(|service| (service, &[][..]))
        .into_iter()
        .chain(arguments)
    {
        let mut command = binary(program);
        command
            .env_clear()
            .args(arguments)
            .env(variable("kafka.lanes"), "many");
        let printed = run(command);
        assert_eq!(
            (printed.code, printed.stderr.as_str()),
            (Some(2), expected),
            "{program}"
        );
    }
}

/// The variables of `.env.example`, each of which is commented out, with their values.
fn example() -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(repository().join(".env.example")).unwrap();
    let entries = text.lines().filter_map(|line| {
        let (name, value) = line.strip_prefix('#')?.split_once('=')?;
        let is_name = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
        name.bytes()
            .all(is_name)
            .then(|| (name.to_owned(), value.to_owned()))
    });
    let entries: BTreeMap<String, String> = entries.collect();
    let lines = text
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty());
    assert_eq!(
        lines.collect::<Vec<_>>(),
        Vec::<&str>::new(),
        "copying it changes nothing"
    );
    entries
}

/// The names after each occurrence of a text, as far as they are names of variables.
fn names_after(text: &str, prefix: &str) -> BTreeSet<String> {
    let is_name = |letter: &char| letter.is_ascii_uppercase() || letter.is_ascii_digit() || *letter == '_';
    let names = text.split(prefix).skip(1);
    names
        .map(|rest| rest.chars().take_while(is_name).collect::<String>())
        .filter(|name| !name.is_empty())
        .collect()
}

#[test]
fn example_has_documented_variables() {
    let compose = std::fs::read_to_string(repository().join("docker-compose.yml")).unwrap();
    let example = example();
    let (settings, of_compose): (BTreeMap<_, _>, BTreeMap<_, _>) = example
        .into_iter()
        .partition(|(name, _)| name.starts_with("REDELIVER__"));
    assert_eq!(
        of_compose.into_keys().collect::<BTreeSet<_>>(),
        names_after(&compose, "${")
    );

    let mentioned = [
        "README.md",
        "docs/configuration.md",
        "docs/quickstart.md",
        "docs/secure.md",
    ]
    .map(|page| {
        let text = std::fs::read_to_string(repository().join(page)).unwrap();
        names_after(&text, "REDELIVER__")
    });
    let mentioned: BTreeSet<String> = mentioned
        .into_iter()
        .flatten()
        .map(|name| format!("REDELIVER__{name}"))
        .collect();
    assert!(mentioned.len() >= 3, "{mentioned:?}");
    let known: BTreeSet<String> = settings.keys().cloned().collect();
    assert_eq!(
        mentioned.difference(&known).collect::<Vec<_>>(),
        Vec::<&String>::new()
    );

    // Each of them is a valid setting, and the value in the example changes nothing.
    let effective = |settings| {
        let mut command = binary("redeliver");
        command.env_clear().args(["status", "--print-config", "--config"]);
        command
            .arg(deploy().join("compose/redeliver.yaml"))
            .envs(settings);
        let printed = run(command);
        assert_eq!(printed.code, Some(0), "{printed:?}");
        printed.stdout
    };
    assert_eq!(effective(settings), effective(BTreeMap::new()));
}

#[test]
fn compose_services_read_environment_file() {
    let compose = std::fs::read_to_string(repository().join("docker-compose.yml")).unwrap();
    let compose: Value = serde_saphyr::from_str(&compose).unwrap();
    let expected = serde_json::json!([{ "path": ".env", "required": false }]);
    let services = compose["services"].as_object().unwrap();
    let ours = services.iter().filter(|(_, service)| {
        let image = service["image"].as_str().unwrap_or_default();
        image == "redeliver" || image.starts_with("redeliver-")
    });
    let mut count = 0;
    for (name, service) in ours {
        assert_eq!(service["env_file"], expected, "{name}");
        count += 1;
    }
    assert_eq!(count, 9);
}
