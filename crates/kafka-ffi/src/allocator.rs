//! An option of mimalloc.

use libmimalloc_sys as mi;

/// `mi_option_purge_delay` of `mimalloc.h`; the bindings lack its name.
const PURGE_DELAY: mi::mi_option_t = 15;

/// Makes mimalloc return unused pages to the system at once instead of after a second. For programs that are idle for long
/// times after a burst. The environment variable `MIMALLOC_PURGE_DELAY` takes precedence.
pub fn purge_at_once() {
    // SAFETY: the option exists, and setting it has no precondition.
    unsafe { mi::mi_option_set_default(PURGE_DELAY, 0) }
}

#[cfg(test)]
mod tests {
    #[global_allocator]
    static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

    const MIB: usize = 1 << 20;

    /// The resident memory of this process in MiB.
    fn resident() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() >> 10
    }

    #[test]
    fn freed_pages_are_returned_at_once() {
        super::purge_at_once();
        let blocks: Vec<_> = (0..256).map(|_| vec![1_u8; MIB]).collect();
        let used = resident();
        drop(blocks);
        let left = resident();
        assert!(left + 200 < used, "{left} of {used} MiB");
    }
}
