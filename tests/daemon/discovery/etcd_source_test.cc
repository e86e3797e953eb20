// Discovery by etcd against a server that keeps keys and leases as etcd does, and does as the test
// says. The real etcd is check_etcd.py's.
#include "daemon/discovery/etcd_source.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "daemon/discovery/bystander.h"
#include "shm/limits.h"
#include "tests/daemon/discovery/tls_files.h"
#include "tests/daemon/service/process_rig.h"

namespace mk::daemon {
namespace {

using namespace etcdserverpb;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr const char* kPrefix = "/mkernel/nodes/";

/// The part of etcd that is used, in memory. Everything under `mutex`.
class FakeEtcd final : public KV::Service, public Lease::Service {
 public:
  explicit FakeEtcd(const std::shared_ptr<grpc::ServerCredentials>& credentials =
                        grpc::InsecureServerCredentials()) {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", credentials, &port);
    builder.RegisterService(static_cast<KV::Service*>(this));
    builder.RegisterService(static_cast<Lease::Service*>(this));
    server_ = builder.BuildAndStart();
    endpoint = fmt::format("127.0.0.1:{}", port);
  }
  ~FakeEtcd() override { server_->Shutdown(std::chrono::system_clock::now()); }

  grpc::Status Range(grpc::ServerContext* context, const RangeRequest* request,
                     RangeResponse* response) override {
    std::unique_lock lock(mutex);
    ++looks;
    changed.notify_all();
    // Nobody notifies of the end of a call.
    while (hangs && !context->IsCancelled()) changed.wait_for(lock, std::chrono::milliseconds(10));
    for (auto at = keys.lower_bound(request->key());
         at != keys.end() && at->first < request->range_end(); ++at) {
      *response->add_kvs() = at->second;
    }
    return grpc::Status::OK;
  }

  grpc::Status Txn(grpc::ServerContext*, const TxnRequest* request,
                   TxnResponse* response) override {
    std::lock_guard lock(mutex);
    if (before_txn) before_txn();
    const Compare& compare = request->compare(0);
    const auto at = keys.find(compare.key());
    const std::int64_t there = at == keys.end() ? 0 : at->second.mod_revision();
    response->set_succeeded(compare.target() == Compare::MOD && there == compare.mod_revision());
    if (response->succeeded()) {
      const PutRequest& put = request->success(0).request_put();
      set(put.key(), put.value(), put.lease());
    } else if (at != keys.end()) {
      *response->add_responses()->mutable_response_range()->add_kvs() = at->second;
    }
    return grpc::Status::OK;
  }

  grpc::Status LeaseGrant(grpc::ServerContext*, const LeaseGrantRequest* request,
                          LeaseGrantResponse* response) override {
    std::lock_guard lock(mutex);
    response->set_error(refusal);
    if (!refusal.empty()) return grpc::Status::OK;
    response->set_id(++last_lease);
    response->set_ttl(request->ttl());
    leases.insert(last_lease);
    return grpc::Status::OK;
  }

  grpc::Status LeaseKeepAlive(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<LeaseKeepAliveResponse, LeaseKeepAliveRequest>* stream) override {
    LeaseKeepAliveRequest request;
    while (stream->Read(&request)) {
      std::lock_guard lock(mutex);
      if (mute) return grpc::Status::OK;
      ++renewals;
      LeaseKeepAliveResponse response;
      response.set_id(request.id());
      response.set_ttl(leases.contains(request.id()) ? 10 : 0);
      if (!stream->Write(response)) break;
    }
    return grpc::Status::OK;
  }

  grpc::Status LeaseRevoke(grpc::ServerContext*, const LeaseRevokeRequest* request,
                           LeaseRevokeResponse*) override {
    std::lock_guard lock(mutex);
    end_lease(request->id());
    return grpc::Status::OK;
  }

  void change(const std::function<void()>& what) {
    std::lock_guard lock(mutex);
    what();
  }

  // With `mutex` held:
  void set(const std::string& key, const std::string& value, std::int64_t lease = 0) {
    KeyValue& entry = keys[key];
    entry.set_key(key);
    entry.set_value(value);
    entry.set_lease(lease);
    entry.set_mod_revision(++revision);
  }
  void end_lease(std::int64_t lease) {
    leases.erase(lease);
    std::erase_if(keys, [lease](const auto& entry) { return entry.second.lease() == lease; });
  }

  std::string endpoint;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, KeyValue> keys;
  std::set<std::int64_t> leases;
  std::int64_t revision = 0, last_lease = 0;
  std::size_t looks = 0, renewals = 0;
  bool hangs = false, mute = false;
  std::string refusal;
  std::function<void()> before_txn;

 private:
  std::unique_ptr<grpc::Server> server_;
};

class EtcdSourceTest : public testing::Test {
 protected:
  std::unique_ptr<EtcdSource> source(std::uint32_t node, std::uint16_t port,
                                     std::vector<std::string> endpoints = {},
                                     const TlsTexts& tls = {}) {
    Config config;
    config.discovery.etcd.endpoints =
        endpoints.empty() ? std::vector{etcd_.endpoint} : std::move(endpoints);
    config.discovery.etcd.prefix = kPrefix;
    return std::make_unique<EtcdSource>(
        config, DiscoverySelf{node, 1, {.host = "10.0.0.1", .port = port}}, tls);
  }
  /// "id@address" of what a look finds; the error otherwise.
  static std::vector<std::string> look(EtcdSource& source) {
    const auto found = source.look();
    if (!found) return {found.error().message};
    std::vector<std::string> texts;
    for (const PeerConfig& peer : *found) {
      texts.push_back(fmt::format("{}@{}{}", peer.id, peer.address.text(), peer.name));
    }
    return texts;
  }
  static std::string key(std::uint32_t node) { return kPrefix + std::to_string(node); }
  std::set<std::string> keys() {
    std::lock_guard lock(etcd_.mutex);
    std::set<std::string> keys;
    for (const auto& [name, entry] : etcd_.keys) keys.insert(name);
    return keys;
  }

  FakeEtcd etcd_;
};

TEST_F(EtcdSourceTest, DaemonsFindEachOther) {
  const auto one = source(1, 71), two = source(2, 72);
  EXPECT_THAT(look(*one), IsEmpty());
  EXPECT_THAT(look(*two), ElementsAre("1@10.0.0.1:71"));
  EXPECT_THAT(look(*one), ElementsAre("2@10.0.0.1:72"));
  two->leave();
  EXPECT_THAT(look(*one), IsEmpty());
  EXPECT_THAT(keys(), ElementsAre(key(1)));
  two->leave();  // it has left
}

TEST_F(EtcdSourceTest, ABystanderReadsAndLeavesNothingBehind) {
  const auto one = source(1, 71), two = source(2, 72);
  look(*one);
  look(*two);
  Config config;
  config.node_id = 1;  // of the daemon beside it
  config.discovery.kind = "etcd";
  config.discovery.etcd.endpoints = {etcd_.endpoint};
  config.discovery.etcd.prefix = kPrefix;
  const auto seen = find_nodes(config);
  ASSERT_TRUE(seen) << seen.error().message;
  ASSERT_EQ(seen->size(), 1u);
  EXPECT_EQ(seen->front().node, 2u);
  EXPECT_EQ(seen->front().address.text(), "10.0.0.1:72");
  EXPECT_THAT(seen->front().trouble, HasSubstr("takes [tls] or insecure"));
  config.insecure = true;
  config.node_id = 3;
  const auto all = find_nodes(config);
  ASSERT_TRUE(all) << all.error().message;
  EXPECT_EQ(all->size(), 2u);
  EXPECT_EQ(all->back().trouble, "");
  EXPECT_THAT(keys(), ElementsAre(key(1), key(2)));
  std::lock_guard lock(etcd_.mutex);
  EXPECT_EQ(etcd_.last_lease, 2);
}

TEST_F(EtcdSourceTest, WhatIsNotOursIsPassedOver) {
  {
    std::lock_guard lock(etcd_.mutex);
    const std::string good = R"({"address": "10.0.0.9:7", "name": "nine", "more": 1})";
    etcd_.set(key(9), good);
    etcd_.set(key(shm::kNodesMax), good);
    etcd_.set(kPrefix + std::string("8b"), good);
    etcd_.set(kPrefix + std::string("eight"), good);
    etcd_.set(kPrefix, good);
    etcd_.set(key(2), "no JSON");
    etcd_.set(key(3), "[1]");
    etcd_.set(key(4), R"({"address": 5})");
    etcd_.set(key(5), R"({"address": "nowhere"})");
    etcd_.set("/mkernel/nodes0", good);  // the first behind the prefix
  }
  EXPECT_THAT(look(*source(1, 71)), ElementsAre("9@10.0.0.9:7nine"));
}

TEST_F(EtcdSourceTest, TheLeaseIsRenewedAndTakenAnewWhenItRanOut) {
  const auto one = source(1, 71);
  look(*one);
  look(*one);
  {
    std::lock_guard lock(etcd_.mutex);
    EXPECT_EQ(etcd_.last_lease, 1);
    EXPECT_EQ(etcd_.renewals, 1u);
    etcd_.end_lease(1);
  }
  EXPECT_THAT(look(*one), IsEmpty());
  EXPECT_THAT(keys(), ElementsAre(key(1)));
  std::lock_guard lock(etcd_.mutex);
  EXPECT_EQ(etcd_.keys.at(key(1)).lease(), 2);
}

TEST_F(EtcdSourceTest, AKeyThatSomebodyRemovedComesBack) {
  const auto one = source(1, 71);
  look(*one);
  {
    std::lock_guard lock(etcd_.mutex);
    etcd_.keys.clear();
  }
  look(*one);  // sees that it is gone
  look(*one);
  EXPECT_THAT(keys(), ElementsAre(key(1)));
}

TEST_F(EtcdSourceTest, OneNodeIdIsOfOneDaemon) {
  const auto one = source(1, 71), impostor = source(1, 99);
  look(*one);
  const auto refused = impostor->look();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kAlreadyExists);
  EXPECT_THAT(refused.error().message, HasSubstr("node id 1 for the daemon at 10.0.0.1:71"));
  // Started again, it finds its own key, and it is its own from now on.
  const auto again = source(1, 71);
  EXPECT_THAT(look(*again), IsEmpty());
  std::lock_guard lock(etcd_.mutex);
  EXPECT_EQ(etcd_.keys.at(key(1)).lease(), etcd_.last_lease);
}

TEST_F(EtcdSourceTest, AKeyThatChangesMeanwhileIsTriedAgainAtTheNextLook) {
  const auto one = source(1, 71);
  etcd_.change(
      [&] { etcd_.before_txn = [this] { etcd_.set(key(1), R"({"address": "10.0.0.1:71"})"); }; });
  EXPECT_THAT(look(*one), ElementsAre(HasSubstr("changed meanwhile")));
  etcd_.change([&] { etcd_.before_txn = nullptr; });
  EXPECT_THAT(look(*one), IsEmpty());
  // One that is there when it is asked for, and gone when it is read.
  const auto two = source(2, 72);
  int call = 0;
  etcd_.change([&] {
    etcd_.before_txn = [&] {
      if (call++ == 0) etcd_.set(key(2), R"({"address": "10.0.0.1:72"})");
      if (call == 2) etcd_.keys.erase(key(2));
    };
  });
  EXPECT_THAT(look(*two), ElementsAre(HasSubstr("came and went")));
}

TEST_F(EtcdSourceTest, FilesOfTlsThatCannotBeReadAreNamedByTheirKeys) {
  const TempFolder folder;
  const std::string good = folder / "good", junk = folder / "junk", none = folder / "none";
  std::ofstream(good) << "-----BEGIN";
  std::ofstream(junk) << "hello";
  Config config;
  config.discovery.kind = "etcd";
  auto& etcd = config.discovery.etcd;
  etcd.endpoints = {etcd_.endpoint};
  etcd.prefix = kPrefix;
  for (std::string* const file : {&etcd.cert, &etcd.key, &etcd.ca}) {
    const std::string key = file == &etcd.cert ? "cert" : file == &etcd.key ? "key" : "ca";
    for (const std::string& bad : {junk, none}) {
      etcd.cert = etcd.key = etcd.ca = good;
      *file = bad;
      const auto names_it = HasSubstr("discovery.etcd." + key + " " + bad);
      const auto seen = find_nodes(config);
      ASSERT_FALSE(seen);
      EXPECT_THAT(seen.error().message, names_it);
      const auto source = open_discovery(config, {}, {});
      ASSERT_FALSE(source);
      EXPECT_THAT(source.error().message, names_it);
    }
  }
}

TEST_F(EtcdSourceTest, FilesOfTlsThatChangeAreTaken) {
  TlsFiles files;
  files.renew("first");
  auto before = std::make_unique<FakeEtcd>(files.serve("etcd"));
  const TlsTexts tls = files.read();
  files.renew("second");
  FakeEtcd after(files.serve("etcd"));
  const auto one = source(1, 71, {before->endpoint, after.endpoint}, tls);
  EXPECT_TRUE(one->look());
  before.reset();
  EXPECT_TRUE(eventually([&] { return one->look().has_value(); }));
  std::lock_guard lock(after.mutex);
  EXPECT_TRUE(after.keys.contains(key(1)));
}

TEST_F(EtcdSourceTest, ThoseThatDoNotAnswerAreNamed) {
  const TempFolder folder;
  const std::string dead = "unix:" + (folder / "dead"), deaf = "unix:" + (folder / "deaf");
  const auto one = source(1, 71, {dead, etcd_.endpoint});
  EXPECT_THAT(look(*one), IsEmpty());
  EXPECT_THAT(keys(), ElementsAre(key(1)));
  const auto two = source(2, 72, {dead, deaf});
  const auto failed = two->look();
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, ErrorCode::kUnavailable);
  EXPECT_THAT(failed.error().message, HasSubstr("etcd does not answer: " + dead));
  EXPECT_THAT(failed.error().message, HasSubstr(deaf));
  two->leave();  // of nothing
}

TEST_F(EtcdSourceTest, WhatEtcdRefusesIsSaid) {
  const auto one = source(1, 71);
  etcd_.change([&] { etcd_.refusal = "no more leases"; });
  EXPECT_THAT(look(*one), ElementsAre(HasSubstr("no more leases")));
  etcd_.change([&] { etcd_.refusal.clear(); });
  EXPECT_THAT(look(*one), IsEmpty());
  etcd_.change([&] { etcd_.mute = true; });
  EXPECT_THAT(look(*one), ElementsAre(HasSubstr("did not renew the lease")));
  etcd_.change([&] { etcd_.mute = false; });
  EXPECT_THAT(look(*one), IsEmpty());
}

TEST_F(EtcdSourceTest, CancelEndsALookThatWaits) {
  const auto one = source(1, 71);
  etcd_.change([&] { etcd_.hangs = true; });
  std::thread canceller([&] {
    std::unique_lock lock(etcd_.mutex);
    EXPECT_TRUE(etcd_.changed.wait_for(lock, kPatience, [&] { return etcd_.looks != 0; }));
    lock.unlock();
    one->cancel();
  });
  const auto cancelled = one->look();
  canceller.join();
  ASSERT_FALSE(cancelled);
  EXPECT_EQ(cancelled.error().code, ErrorCode::kUnavailable);
  EXPECT_FALSE(one->look());  // and all that follow
  one->leave();
  EXPECT_THAT(keys(), IsEmpty());
}

}  // namespace
}  // namespace mk::daemon
