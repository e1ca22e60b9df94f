//! `redeliver tokens`: tokens of the APIs.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use redeliver_runtime::config::{Scope, TokenConfig, caller_name};
use redeliver_service::identity::new_token;

use crate::connection::{CliError, conclude};
use crate::say;

#[derive(Args)]
pub(crate) struct TokensArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Create a token, and print it with its entry for auth.tokens_file
    #[command(after_help = "Examples:\n  redeliver tokens new --name billing --scope 'jobs:write:billing-*'")]
    New(NewArgs),
}

#[derive(Args)]
struct NewArgs {
    /// Name of the caller in logs and the audit log
    #[arg(long, value_name = "NAME", value_parser = name)]
    name: String,
    /// Scope, such as jobs:read, jobs:write:billing-*, control:write or dead-letters:read; can be repeated
    #[arg(long = "scope", value_name = "SCOPE", required = true)]
    scopes: Vec<Scope>,
}

fn name(text: &str) -> Result<String, String> {
    caller_name(text).map(|()| text.to_owned())
}

pub(crate) fn main(args: &TokensArgs) -> ExitCode {
    let Command::New(args) = &args.command;
    conclude(async { new(args) })
}

fn new(args: &NewArgs) -> Result<ExitCode, CliError> {
    let new =
        new_token().ok_or_else(|| CliError::failed("the operating system provides no random numbers"))?;
    let entry = TokenConfig {
        name: args.name.clone(),
        sha256: new.sha256,
        scopes: args.scopes.clone(),
    };
    let entry = serde_json::to_string(&entry).map_err(CliError::failed)?;
    say("# The token, for its holder. It is not stored and cannot be shown again.");
    say(new.token);
    say("# Its entry in the file of auth.tokens_file, in the list `tokens`:");
    say(format!("  - {entry}"));
    Ok(ExitCode::SUCCESS)
}
