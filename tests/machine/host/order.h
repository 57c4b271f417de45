/* Happens-before of the accesses of all threads, by vector clocks, and the data races among them. See order.cpp. */
#pragma once
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>
#include "machine.h"

typedef std::shared_ptr<std::vector<u32>> Clock; /* by actor; what is behind its end is 0. Never changed while two hold it. */

struct Release { /* what an actor had done and known at some time; `known` is null for copies, which know nothing */
  u32 who, time;
  Clock known;
  u32 scope;
  Clock fenced = nullptr; /* see Actor */
};

struct Releases { /* that an observer of some word or barrier synchronizes with */
  std::vector<Release> list;
  u64 version = 0; /* no two lists of any time have the same one */
};

struct Access {
  u32 who, time; /* who 0: none */
  u32 line : 23, write : 1, scope : 3, bytes : 4; /* scope 0: weak */
  u32 converged; /* reads of shared memory: which convergence of its warp comes next; else 0 */
};

struct Cell { /* accesses to a granule that may still conflict with later ones */
  Access first;
  u32 more; /* index of the list of the others, 0: there are none */
};

struct Place { /* of an actor */
  u32 gpu, cta, thread; /* `cta` is unique among GPUs */
  const char* what;     /* null: a thread */
  bool async;           /* of the asynchronous proxy */
  u32 warp;             /* Actor::warp */
};

struct Actor { /* a thread; it goes on in the thread of the same place of its GPU's next launch */
  u32 who, gpu, cta, time = 1;
  Clock clock;
  Clock fenced; /* what a proxy fence for shared memory has come behind, but for what its own last fence says of it and its warp: */
  u32 fenced_time = 0, fenced_stores = 0, fenced_converged = 0;
  u32 strong = 0, stores = 0;  /* actor of its relaxed stores, and how many there have been */
  u32 warp = 0, converged = 0; /* actor of what lanes of its warp have read of shared memory, and how often they have converged */
  std::vector<Release> seen; /* by relaxed loads: a fence synchronizes with them */
  Release fences[5] = {};    /* the latest fence of each scope */
  u32 copies = 0, copied = 0;              /* actor of its cp.async, and how many there have been */
  std::vector<u32> committed;              /* `copied` at each commit */
  u32 targets = 0, sources = 0, group = 1; /* actors of its bulk stores' writes and reads, and the number of the open group */
};

struct Phase { /* of an mbarrier */
  u32 who = 0, number = 1; /* the actor of the copies that complete on it */
  u32 init_who = 0, init_time = 0;
  Releases arrived, done;
};

struct Order {
  struct Interval { u64 begin, end; };
  std::vector<Interval> kept, loose;
  std::vector<Place> places{{}};
  std::map<std::pair<u32, u32>, std::vector<std::unique_ptr<Actor>>> actors; /* by GPU and CTA */
  std::map<std::pair<u32, u32>, u32> ctas;
  std::vector<u64> clusters;                     /* by CTA: the same for CTAs of a cluster of the running launch */
  std::map<std::pair<u32, u64>, Phase> barriers; /* by CTA and address in its shared memory */
  std::vector<Clock> ended;                      /* by GPU: what its launches have done and known */
  std::map<u64, std::vector<Cell>> cells;        /* of kept buffers */
  std::unordered_map<u64, Releases> words;
  std::vector<std::vector<Access>> lists{1};
  std::vector<u32> free_lists;
  u64 versions = 0;
  struct Same { u64 at; u32 bytes, before; std::string race; };
  std::vector<Same> same; /* what is a race unless a write that is about to happen leaves the bytes as they are */
  std::set<std::string> races;
};
