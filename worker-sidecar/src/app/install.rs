//! `modelrelay-worker install FOLDER`: copies this program into a folder that a container of another image mounts.
//!
//! A worker that starts its engines itself runs in the engines' image, which has no worker; and the worker's own image
//! has no shell that could copy a file.

#[cfg(unix)]
use std::path::Path;
use std::path::PathBuf;
#[cfg(unix)]
use std::{fs, io};

/// The file name of the copy.
#[cfg(unix)]
const NAME: &str = "modelrelay-worker";

/// Arguments of the subcommand.
#[derive(Debug, Clone, clap::Args)]
pub struct InstallArgs {
    /// Folder to copy it into; an older copy there is replaced
    #[arg(value_name = "FOLDER")]
    pub folder: PathBuf,
}

/// Copies the running program. An error is one line that names the file.
#[cfg(unix)]
pub fn run(args: &InstallArgs) -> Result<PathBuf, String> {
    let program = std::env::current_exe().map_err(|error| format!("cannot find this program's executable: {error}"))?;
    copy(&program, &args.folder)
}

/// Linux containers cannot run this program.
#[cfg(not(unix))]
pub fn run(args: &InstallArgs) -> Result<PathBuf, String> {
    let folder = args.folder.display();
    Err(format!(
        "{folder}: install supports Linux containers only, which cannot run this program; copy the .exe yourself"
    ))
}

/// Copies to another name first: a partial file must not be run, and a running one cannot be written to.
#[cfg(unix)]
fn copy(program: &Path, folder: &Path) -> Result<PathBuf, String> {
    use std::os::unix::fs::PermissionsExt;

    let (target, new) = (folder.join(NAME), folder.join(format!(".{NAME}.new")));
    let fail = |error: io::Error| format!("cannot write {}: {error}", target.display());
    fs::copy(program, &new).map_err(fail)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).map_err(fail)?;
    fs::rename(&new, &target).map_err(fail)?;
    Ok(target)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn copied_program_is_executable() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        fs::write(&program, "one").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o400)).unwrap();
        let target = copy(&program, folder.path()).unwrap();
        assert_eq!(target, folder.path().join("modelrelay-worker"));
        assert_eq!(fs::metadata(&target).unwrap().permissions().mode() & 0o777, 0o755);
        // A restarted container finds the older copy.
        fs::set_permissions(&program, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&program, "two").unwrap();
        copy(&program, folder.path()).unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "two");
    }

    #[test]
    fn missing_folder_is_named_in_error() {
        let error = copy(Path::new("/proc/self/exe"), Path::new("/no/such/folder")).unwrap_err();
        assert!(error.starts_with("cannot write /no/such/folder/modelrelay-worker: "), "{error}");
    }
}
