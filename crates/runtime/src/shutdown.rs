//! Signals: the first one asks the process to end in order, the second one ends it at once.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Cancels the token on SIGINT or SIGTERM. A second signal ends the process at once, with the exit code that
/// shells give to that signal: 130 or 143. Must be called within a runtime.
///
/// # Errors
/// When the signals cannot be listened to.
pub fn on_signals(shutdown: CancellationToken) -> io::Result<()> {
    let signals = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    #[expect(
        clippy::disallowed_methods,
        reason = "lives as long as the process and cannot fail"
    )]
    tokio::spawn(listen(signals, shutdown));
    Ok(())
}

async fn listen((mut interrupt, mut terminate): (Signal, Signal), shutdown: CancellationToken) {
    let (name, _) = next(&mut interrupt, &mut terminate).await;
    tracing::info!(
        signal = name,
        "shutting down; a second signal ends the process at once"
    );
    shutdown.cancel();
    let (name, code) = next(&mut interrupt, &mut terminate).await;
    tracing::warn!(signal = name, "ending at once");
    std::process::exit(code);
}

async fn next(interrupt: &mut Signal, terminate: &mut Signal) -> (&'static str, i32) {
    tokio::select! {
        _ = interrupt.recv() => ("SIGINT", 130),
        _ = terminate.recv() => ("SIGTERM", 143),
    }
}
