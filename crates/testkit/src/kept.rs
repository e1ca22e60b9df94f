//! Downloads and installations in the user's cache directory, which all test processes share.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// The directory of this name, which `fetch` fills if it does not exist yet. The name must contain the version, because an
/// existing directory is never checked again.
pub(crate) fn kept(name: &str, what: &str, fetch: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    kept_in(&cache_directory()?, name, what, fetch)
}

fn kept_in(cache: &Path, name: &str, what: &str, fetch: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let place = cache.join(name);
    if place.is_dir() {
        return Ok(place);
    }
    std::fs::create_dir_all(cache).with_context(|| format!("making {}", cache.display()))?;
    // Several test processes may need it at the same time: one fetches it, and the others wait.
    // Versions contain dots, so these are no extensions.
    let beside = |suffix: &str| cache.join(format!("{name}.{suffix}"));
    let lock = beside("lock");
    let lock = File::create(&lock).with_context(|| format!("making {}", lock.display()))?;
    lock.lock()
        .with_context(|| format!("waiting for another process that fetches {what}"))?;
    if !place.is_dir() {
        // Renamed when it is complete, so a directory with the final name is never partial.
        let partial = beside("partial");
        drop(std::fs::remove_dir_all(&partial));
        std::fs::create_dir_all(&partial).with_context(|| format!("making {}", partial.display()))?;
        fetch(&partial)?;
        std::fs::rename(&partial, &place)
            .with_context(|| format!("renaming {} to {}", partial.display(), place.display()))?;
    }
    Ok(place)
}

/// `$XDG_CACHE_HOME/redeliver`, else `~/.cache/redeliver`.
fn cache_directory() -> Result<PathBuf> {
    let set = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let base = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    Ok(base
        .context("finding a cache directory: neither XDG_CACHE_HOME nor HOME is set")?
        .join("redeliver"))
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn only_complete_directory_is_kept() {
        let cache = Scratch::new("kept").unwrap();
        let get = |fetch: fn(&Path) -> Result<()>| kept_in(cache.path(), "a-1", "a", fetch);
        let half = |place: &Path| {
            std::fs::write(place.join("half"), "")?;
            bail!("the network is gone")
        };
        assert!(get(half).is_err());
        let place = get(|place| Ok(std::fs::write(place.join("all"), "")?)).unwrap();
        assert!(place.join("all").exists() && !place.join("half").exists());
        assert_eq!(get(half).unwrap(), place);
    }
}
