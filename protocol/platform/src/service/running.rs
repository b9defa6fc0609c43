//! The running service.

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Once, OnceLock};
use std::thread;
use std::time::Duration;

use tokio::sync::Notify;
use windows_service::Error;
use windows_service::service::{
    ServiceControl, ServiceControlAccept, ServiceExitCode, ServiceState, ServiceStatus, ServiceType,
};
use windows_service::service_control_handler::{self, ServiceControlHandlerResult, ServiceStatusHandle};
use windows_service::service_dispatcher;

use super::{Program, RunArgs};
use crate::log;

/// The error code if the process was not started by the service manager.
const NOT_A_SERVICE: i32 = 1063;

/// The interval between reports that the service is still stopping.
const WAIT_STEP: Duration = Duration::from_secs(2);

/// The time without a report after which the service manager may consider the service hung.
const WAIT_HINT: Duration = Duration::from_secs(20);

static STOP: Notify = Notify::const_new();

/// The service manager calls a bare function, on a thread of its own.
static RUN: OnceLock<(&Program, RunArgs)> = OnceLock::new();

enum Event {
    /// The service manager requests a stop.
    Stop,
    /// The program has ended.
    End,
}

/// True if this process is a service, or is about to become one.
pub(crate) fn is_running() -> bool {
    RUN.get().is_some()
}

/// Waits until the service manager requests a stop. In a process that is no service it never returns.
pub(crate) async fn stop_requested() {
    STOP.notified().await;
}

pub(super) fn run(program: &'static Program, args: &RunArgs) -> Result<String, String> {
    let _ = RUN.set((program, args.clone()));
    match service_dispatcher::start(program.service, service_main) {
        Ok(()) => Ok(String::new()),
        // The program was started from a terminal: the error is shown there, not in the log.
        Err(Error::Winapi(error)) if error.raw_os_error() == Some(NOT_A_SERVICE) => {
            Err("`service run` is for the Windows service manager only; to run the program, omit `service run`"
                .to_owned())
        }
        Err(error) => {
            let _ = log::to_file(&args.log);
            Err(format!("cannot reach the service manager: {error}"))
        }
    }
}

extern "system" fn service_main(_: u32, _: *mut *mut u16) {
    let Some((program, args)) = RUN.get() else { return };
    // Without a log the reason cannot be reported; the service manager sees only that the service ended.
    let is_logged = log::to_file(&args.log).is_ok();
    // At most one of each event.
    let (events, received) = sync_channel(2);
    let manager = match service_control_handler::register(program.service, on_control(events.clone())) {
        Ok(manager) => manager,
        Err(error) => return log::print_error(&format!("cannot register with the service manager: {error}")),
    };
    set_status(manager, ServiceState::Running, 0, ServiceExitCode::NO_ERROR);
    let waiting = thread::spawn(move || extend_stop(manager, &received));
    let code = if is_logged { run_program(program, args) } else { ExitCode::FAILURE };
    let _ = events.send(Event::End);
    let _ = waiting.join();
    let code = match code == ExitCode::SUCCESS {
        true => ServiceExitCode::NO_ERROR,
        false => ServiceExitCode::ServiceSpecific(1),
    };
    set_status(manager, ServiceState::Stopped, 0, code);
}

/// Windows may stop a service again when it shuts down while the service is stopping. That is not a second signal.
fn on_control(events: SyncSender<Event>) -> impl FnMut(ServiceControl) -> ServiceControlHandlerResult {
    let first = Once::new();
    #[allow(clippy::wildcard_enum_match_arm)] // No other control is accepted, and Windows may add more.
    move |control| match control {
        ServiceControl::Stop | ServiceControl::Shutdown | ServiceControl::Preshutdown => {
            first.call_once(|| {
                let _ = events.send(Event::Stop);
                STOP.notify_one();
            });
            ServiceControlHandlerResult::NoError
        }
        ServiceControl::Interrogate => ServiceControlHandlerResult::NoError,
        _ => ServiceControlHandlerResult::NotImplemented,
    }
}

fn run_program(program: &Program, args: &RunArgs) -> ExitCode {
    if let Err(error) = std::env::set_current_dir(&args.folder) {
        log::print_error(&format!("cannot change to the folder {}: {error}", args.folder.display()));
        return ExitCode::FAILURE;
    }
    (program.run)([OsString::from(program.service)].into_iter().chain(args.flags.iter().cloned()).collect())
}

/// Reports progress from the stop until the end of the program.
fn extend_stop(manager: ServiceStatusHandle, events: &Receiver<Event>) {
    if !matches!(events.recv(), Ok(Event::Stop)) {
        return;
    }
    for step in 1.. {
        set_status(manager, ServiceState::StopPending, step, ServiceExitCode::NO_ERROR);
        match events.recv_timeout(WAIT_STEP) {
            Err(RecvTimeoutError::Timeout) | Ok(Event::Stop) => {}
            Ok(Event::End) | Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn set_status(manager: ServiceStatusHandle, state: ServiceState, checkpoint: u32, exit_code: ServiceExitCode) {
    let is_pending = state == ServiceState::StopPending;
    // Preshutdown instead of shutdown, which leaves less time.
    let accepted = ServiceControlAccept::STOP | ServiceControlAccept::PRESHUTDOWN;
    let status = ServiceStatus {
        service_type: ServiceType::OWN_PROCESS,
        current_state: state,
        controls_accepted: if state == ServiceState::Running { accepted } else { ServiceControlAccept::empty() },
        exit_code,
        checkpoint,
        wait_hint: if is_pending { WAIT_HINT } else { Duration::ZERO },
        process_id: None,
    };
    if let Err(error) = manager.set_service_status(status) {
        log::print_error(&format!("cannot report the service state to the service manager: {error}"));
    }
}
