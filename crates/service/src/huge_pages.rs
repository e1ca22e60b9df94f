//! Transparent huge pages, which the allocator asks for.

use std::io;

/// Disables them for this process. With pages of 2 MiB, the small and long-lived heap of an idle service takes several times the memory.
///
/// # Errors
/// If the operating system does not allow it. The process then needs more memory.
pub(crate) fn disable() -> io::Result<()> {
    #[cfg(target_os = "linux")]
    nix::sys::prctl::set_thp_disable(true)?;
    Ok(())
}
