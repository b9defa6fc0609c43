// A worker that the test controls, with only the oldest messages of the protocol: it registers, responds to heartbeats, and keeps
// its requests.

const PATIENCE_MS = 20_000;

export class HandWorker {
  static async dial(relay, secret, registration) {
    const url = `${relay.replace('http', 'ws')}/v1/worker/connect?provider=${registration.provider ?? 'local'}`;
    const hand = new HandWorker(new WebSocket(url, { headers: { 'x-worker-secret': secret } }), registration);
    await hand.acknowledged;
    return hand;
  }

  constructor(socket, { name, models, slots = 1 }) {
    this.socket = socket;
    this.requests = [];
    this.load = 0;
    this.acknowledged = new Promise((resolve, reject) => {
      const late = setTimeout(() => reject(new Error(`${name} was not acknowledged`)), PATIENCE_MS);
      socket.onopen = () => this.send({ type: 'register', worker_name: name, models, max_concurrent: slots, protocol_version: '1', version: 'hand', current_load: 0 });
      socket.onerror = (event) => reject(new Error(`${name} was not accepted: ${event.message}`));
      socket.onmessage = ({ data }) => {
        const message = JSON.parse(data);
        if (message.type === 'register_ack') {
          clearTimeout(late);
          resolve();
        } else if (message.type === 'ping') {
          this.send({ type: 'pong', current_load: this.requests.length, timestamp_unix_ms: message.timestamp_unix_ms });
        } else if (message.type === 'request') {
          this.requests.push(message.request_id);
        } else if (message.type === 'cancel') {
          this.requests = this.requests.filter((id) => id !== message.request_id);
        }
      };
    });
  }

  send(message) {
    this.socket.send(JSON.stringify(message));
  }

  close() {
    this.socket.onerror = null;
    this.socket.close();
  }
}
