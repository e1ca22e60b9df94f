//! Signals: the first one shuts down gracefully, the second one exits immediately.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Cancels the token on SIGINT or SIGTERM. A second signal exits the process immediately, with the conventional exit code
/// of shells: 130 for SIGINT, 143 for SIGTERM. Must be called within a tokio runtime.
///
/// # Errors
/// When the signal handlers cannot be installed.
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
    tracing::info!(signal = name, "shutting down; a second signal exits immediately");
    shutdown.cancel();
    let (name, code) = next(&mut interrupt, &mut terminate).await;
    tracing::warn!(signal = name, "exiting immediately");
    std::process::exit(code);
}

async fn next(interrupt: &mut Signal, terminate: &mut Signal) -> (&'static str, i32) {
    tokio::select! {
        _ = interrupt.recv() => ("SIGINT", 130),
        _ = terminate.recv() => ("SIGTERM", 143),
    }
}
