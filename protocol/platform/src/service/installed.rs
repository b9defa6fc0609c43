//! The service's entry in the service manager.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use windows_service::Error;
use windows_service::service::{
    Service, ServiceAccess, ServiceAction, ServiceActionType, ServiceErrorControl, ServiceFailureActions,
    ServiceFailureResetPeriod, ServiceInfo, ServiceStartType, ServiceState, ServiceType,
};
use windows_service::service_manager::{ServiceManager, ServiceManagerAccess};

use super::{InstallArgs, Program, SUBCOMMAND, variables};
use crate::own_program;

/// The delay after a first and a second failure; after each later one [`RESTART_LATER`] applies.
const RESTART_SOON: Duration = Duration::from_secs(5);
const RESTART_LATER: Duration = Duration::from_secs(60);

/// After this time without a failure, the failure count starts again.
const FORGET_FAILURES: Duration = Duration::from_secs(3600);

/// How long Windows waits for the service at shutdown, which leaves room for a drain. The systemd units in `deploy/`
/// have the same limit. The default of Windows is ten seconds.
const LAST_DRAIN: Duration = Duration::from_secs(630);

/// The poll interval while a service stops.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

const ACCESS_DENIED: i32 = 5;
const NO_SUCH_SERVICE: i32 = 1060;
const NOT_ACTIVE: i32 = 1062;
const EXISTS: i32 = 1073;

pub(super) fn install(program: &Program, args: &InstallArgs) -> Result<String, String> {
    let config = absolute(&args.config)?;
    let log = absolute(&args.log.clone().unwrap_or_else(|| config.with_extension("log")))?;
    let folder = config.parent().ok_or_else(|| format!("{} is not a file", config.display()))?.to_path_buf();
    let exe =
        std::env::current_exe().map_err(|error| format!("cannot determine the path of this executable: {error}"))?;
    let flags: Vec<OsString> =
        [OsString::from("--config"), config.clone().into()].into_iter().chain(args.flags.iter().cloned()).collect();
    check(program, &exe, &folder, &flags)?;
    let words = own_program::selector().into_iter().chain([SUBCOMMAND, "run", "--log"]).map(OsString::from);
    let words = words.chain([log.clone().into(), "--folder".into(), folder.into(), "--".into()]).chain(flags);
    let info = ServiceInfo {
        name: program.service.into(),
        display_name: program.title.into(),
        service_type: ServiceType::OWN_PROCESS,
        start_type: ServiceStartType::AutoStart,
        error_control: ServiceErrorControl::Normal,
        executable_path: exe,
        launch_arguments: words.collect(),
        dependencies: Vec::new(),
        account_name: args.account.clone(),
        account_password: None,
    };
    let failed = |error| explain(program, "installed", &error);
    let access = ServiceAccess::CHANGE_CONFIG | ServiceAccess::START;
    let service = manager(ServiceManagerAccess::CONNECT | ServiceManagerAccess::CREATE_SERVICE)
        .and_then(|manager| manager.create_service(&info, access))
        .map_err(failed)?;
    service.set_description(program.about).map_err(failed)?;
    let restarts = match restart_on_failure(&service) {
        Ok(()) => "It restarts on failure.".to_owned(),
        Err(error) => format!("It does NOT restart on failure: {}", cause(&error)),
    };
    let last = match service.set_preshutdown_timeout(LAST_DRAIN) {
        Ok(()) => String::new(),
        Err(error) => format!(" Windows does NOT wait for it to drain at shutdown: {}", cause(&error)),
    };
    let account = args.account.as_deref().unwrap_or(OsStr::new("LocalSystem"));
    Ok(format!(
        "installed the service {name}, which starts with Windows, as {account}. {restarts}{last}\n\
        configuration: {config}\nlog: {log}\nto start it now: Start-Service {name}\n",
        name = program.service,
        account = account.display(),
        config = config.display(),
        log = log.display(),
    ))
}

#[expect(clippy::disallowed_methods, reason = "a command without a runtime polls the service manager")]
pub(super) fn uninstall(program: &Program) -> Result<String, String> {
    let failed = |error| explain(program, "removed", &error);
    let access = ServiceAccess::QUERY_STATUS | ServiceAccess::STOP | ServiceAccess::DELETE;
    let service = manager(ServiceManagerAccess::CONNECT)
        .and_then(|manager| manager.open_service(program.service, access))
        .map_err(failed)?;
    match service.stop() {
        Err(error) if code(&error) != Some(NOT_ACTIVE) => return Err(failed(error)),
        Ok(_) | Err(_) => {}
    }
    // Without a timeout: the program's own limits apply.
    while service.query_status().map_err(failed)?.current_state != ServiceState::Stopped {
        thread::sleep(LOOK_AGAIN);
    }
    service.delete().map_err(failed)?;
    Ok(format!("removed the service {}; its configuration and log were kept\n", program.service))
}

/// Runs the program's own `check` before anything is changed. It does so without the environment variables of the
/// installing user, because the service will not have them.
fn check(program: &Program, exe: &Path, folder: &Path, flags: &[OsString]) -> Result<(), String> {
    let mut command = Command::new(exe);
    command.args(own_program::selector()).args(flags).arg("check").current_dir(folder).stdin(Stdio::null());
    for variable in variables(program) {
        command.env_remove(variable);
    }
    let checked = command.output().map_err(|error| format!("cannot run {}: {error}", exe.display()))?;
    if checked.status.success() {
        return Ok(());
    }
    Err(format!(
        "the service was not installed because `check` failed:\n{}",
        String::from_utf8_lossy(&checked.stderr).trim_end()
    ))
}

fn restart_on_failure(service: &Service) -> windows_service::Result<()> {
    let restart = |delay| ServiceAction { action_type: ServiceActionType::Restart, delay };
    service.update_failure_actions(ServiceFailureActions {
        reset_period: ServiceFailureResetPeriod::After(FORGET_FAILURES),
        reboot_msg: None,
        command: None,
        actions: Some([RESTART_SOON, RESTART_SOON, RESTART_LATER].map(restart).to_vec()),
    })?;
    // An exit with an error is also a failure, not only a crash.
    service.set_failure_actions_on_non_crash_failures(true)
}

fn manager(access: ServiceManagerAccess) -> windows_service::Result<ServiceManager> {
    ServiceManager::local_computer(None::<&OsStr>, access)
}

fn explain(program: &Program, done: &str, error: &Error) -> String {
    let name = program.service;
    let why = match code(error) {
        Some(ACCESS_DENIED) => "administrator rights are required: open a PowerShell \"as administrator\"".to_owned(),
        Some(EXISTS) => "it already exists; `service uninstall` removes it".to_owned(),
        Some(NO_SUCH_SERVICE) => "it does not exist".to_owned(),
        Some(_) | None => cause(error),
    };
    format!("the service {name} cannot be {done}: {why}")
}

fn cause(error: &Error) -> String {
    if let Error::Winapi(error) = error { error.to_string() } else { error.to_string() }
}

fn code(error: &Error) -> Option<i32> {
    if let Error::Winapi(error) = error { error.raw_os_error() } else { None }
}

fn absolute(file: &Path) -> Result<PathBuf, String> {
    std::path::absolute(file).map_err(|error: io::Error| format!("{}: {error}", file.display()))
}
