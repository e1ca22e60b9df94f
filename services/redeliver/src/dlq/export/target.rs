//! Where an export is written: to stdout, or to a file that exists only when it is complete.

use std::io::{self, BufWriter, Stdout, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::connection::CliError;

pub(in crate::dlq) enum Target {
    Stdout(BufWriter<Stdout>),
    /// A temporary file in the directory of the file, whose place it takes at the end.
    File {
        temporary: BufWriter<NamedTempFile>,
        path: PathBuf,
        overwrites: bool,
    },
}

impl Target {
    pub(super) fn stdout() -> Self {
        Self::Stdout(BufWriter::new(io::stdout()))
    }

    pub(super) fn file(path: &Path, overwrites: bool) -> Result<Self, CliError> {
        if !overwrites && path.symlink_metadata().is_ok() {
            return Err(exists(path));
        }
        if path.is_dir() {
            return Err(CliError::Usage(format!(
                "--file: {} is a directory",
                path.display()
            )));
        }
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let temporary = NamedTempFile::new_in(directory.unwrap_or(Path::new(".")));
        let temporary = temporary.map_err(|error| {
            // The text of the error names the temporary file.
            let cause = error.kind();
            CliError::Usage(format!("--file: cannot create {}: {cause}", path.display()))
        })?;
        Ok(Self::File {
            temporary: BufWriter::new(temporary),
            path: path.to_owned(),
            overwrites,
        })
    }

    pub(super) fn is_file(&self) -> bool {
        matches!(self, Self::File { .. })
    }

    /// Keeps the written file.
    pub(super) fn keep(self) -> Result<(), CliError> {
        let writing = |error| CliError::Io("writing the export", error);
        match self {
            Self::Stdout(mut stdout) => stdout.flush().map_err(writing),
            Self::File {
                temporary,
                path,
                overwrites,
            } => {
                let temporary = temporary
                    .into_inner()
                    .map_err(|error| writing(error.into_error()))?;
                temporary.as_file().sync_all().map_err(writing)?;
                let kept = if overwrites {
                    temporary.persist(&path)
                } else {
                    // Another process may have created it meanwhile.
                    temporary.persist_noclobber(&path)
                };
                match kept {
                    Ok(_) => Ok(()),
                    Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => Err(exists(&path)),
                    Err(error) => Err(writing(error.error)),
                }
            }
        }
    }
}

impl Write for Target {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Stdout(stdout) => stdout.write(bytes),
            Self::File { temporary, .. } => temporary.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Stdout(stdout) => stdout.flush(),
            Self::File { temporary, .. } => temporary.flush(),
        }
    }
}

fn exists(path: &Path) -> CliError {
    CliError::Usage(format!(
        "--file: {} exists; --force overwrites it",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use redeliver_testkit::scratch::Scratch;

    use super::*;

    #[test]
    fn only_complete_file_appears() {
        let directory = Scratch::new("export").unwrap();
        let path = directory.path().join("a.jsonl");
        let names = || std::fs::read_dir(directory.path()).unwrap().count();
        let mut target = Target::file(&path, false).unwrap();
        target.write_all(b"one").unwrap();
        assert!(!path.exists());
        target.keep().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"one");

        let problem = Target::file(&path, false).err().unwrap().to_string();
        assert!(problem.contains("--force"), "{problem}");
        let mut target = Target::file(&path, true).unwrap();
        target.write_all(b"two").unwrap();
        drop(target);
        // A failed export leaves only the previous file.
        assert_eq!((std::fs::read(&path).unwrap(), names()), (b"one".to_vec(), 1));
        let mut target = Target::file(&path, true).unwrap();
        target.write_all(b"three").unwrap();
        target.keep().unwrap();
        assert_eq!((std::fs::read(&path).unwrap(), names()), (b"three".to_vec(), 1));

        let other = directory.path().join("b.jsonl");
        let target = Target::file(&other, false).unwrap();
        std::fs::write(&other, b"of another process").unwrap();
        assert!(target.keep().is_err());
        assert_eq!(std::fs::read(&other).unwrap(), b"of another process");
        assert!(Target::file(directory.path(), true).is_err());
    }
}
