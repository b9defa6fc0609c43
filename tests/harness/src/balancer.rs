//! A TCP load balancer in front of relays, like a Kubernetes Service: it is not sticky, and it can cut its connections.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::relay::Relay;

/// A balancer. Each connection goes to the next relay. It runs until its test ends, even if this is dropped.
#[derive(Debug)]
pub struct Balancer {
    addr: SocketAddr,
    relays: Arc<Mutex<Vec<SocketAddr>>>,
    connections: Arc<AtomicUsize>,
    carried: Arc<Mutex<JoinSet<()>>>,
}

impl Balancer {
    /// Starts in front of these relays.
    ///
    /// # Panics
    /// If no port is free.
    pub async fn start(relays: &[&Relay]) -> Self {
        let relays = Arc::new(Mutex::new(relays.iter().map(|relay| relay.addr()).collect::<Vec<_>>()));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("a bound socket");
        let (connections, carried) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(JoinSet::new())));
        let (behind, count, tasks) = (Arc::clone(&relays), Arc::clone(&connections), Arc::clone(&carried));
        tokio::spawn(async move {
            while let Ok((mut inbound, _)) = listener.accept().await {
                let relay = {
                    let behind = behind.lock().unwrap_or_else(PoisonError::into_inner);
                    let number = count.fetch_add(1, Ordering::SeqCst);
                    number.checked_rem(behind.len()).map(|number| behind[number])
                };
                // Without a relay, the connection is closed at once.
                let Some(relay) = relay else { continue };
                tasks.lock().unwrap_or_else(PoisonError::into_inner).spawn(async move {
                    if let Ok(mut outbound) = TcpStream::connect(relay).await {
                        let _ = tokio::io::copy_bidirectional(&mut inbound, &mut outbound).await;
                    }
                });
            }
        });
        Self { addr, relays, connections, carried }
    }

    /// The address for clients.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The address for workers.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Adds a relay.
    pub fn add(&self, relay: &Relay) {
        self.relays.lock().unwrap_or_else(PoisonError::into_inner).push(relay.addr());
    }

    /// Sends no new connection to this relay. Those that are open stay.
    pub fn remove(&self, relay: &Relay) {
        self.relays.lock().unwrap_or_else(PoisonError::into_inner).retain(|addr| *addr != relay.addr());
    }

    /// The number of connections so far.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// Cuts every open connection; new ones are accepted.
    pub fn cut(&self) {
        self.carried.lock().unwrap_or_else(PoisonError::into_inner).abort_all();
    }
}
