-- KEYS[1] meta  [2] flows  [3] sizes  [4] ended  [5] buckets  [6] recent  [7] evicted  [8] key logs
-- ARGV[1] seal, or '' to keep the current one  [2] from  [3] to  [4] now, ms  [5] token of the preceding clear, or ''
--     [6] prefix of other keys  [7] for how many ms after its end a job has a record in any case  [8] 1 to apply even if the memory is full
--     [9] maximum number of ended jobs with a record
-- then lists, each preceded by its length:
--   names of flows
--   buckets, for each its name and three lists: number of the flow, due time, id and record of scheduled jobs; number of the
--     flow, time to forget, id and record of ended jobs; number of the flow and id of forgotten jobs. That number is 0 if
--     the flow is unknown, or -1 if no flow has the job
--   ids of ended jobs, each followed by the time of the end, in the order of the ends
--   logs of idempotency keys, for each its name (BITS.NUMBER for a time slice of 2^BITS ms), its time to live in ms, and a list:
--     hash and value of each key
-- An empty range at the checkpoint renews its time.
-- A batch that ends before it begins is a gap: the topic has lost records.
-- Returns 'OK', 'GAP' with the offset of the checkpoint and the beginning of the range, or 'LOCATE' with the ids of forgotten jobs that may be in
-- any flow. Then nothing has changed.
local meta = redis.call('HMGET', KEYS[1], 'cleared', 'counts')
local offset, cleared = known[1], meta[1]
if tonumber(ARGV[2]) > tonumber(ARGV[3]) then
  return {'GAP', offset, ARGV[2]}
elseif offset then
  if meta[2] ~= counts() then
    without_mark()
    return {'GAP', false, ARGV[2]}
  elseif tonumber(offset) >= tonumber(ARGV[3]) then
    if offset == ARGV[2] and offset == ARGV[3] then
      if ARGV[8] == '1' then
        redis.call('ZREM', KEYS[2], '')
      end
      redis.call('HSET', KEYS[1], 'at', ARGV[4], 'seen', seconds())
    end
    return {'OK'}
  elseif tonumber(offset) < tonumber(ARGV[2]) then
    return {'GAP', offset, ARGV[2]}
  end
elseif ARGV[5] == '' or cleared ~= ARGV[5] then
  return {'GAP', false, ARGV[2]}
end

local prefix = ARGV[6]
local at = 10

local function next_value()
  at = at + 1
  return ARGV[at - 1]
end

-- Calls a command with many values in parts: unpack is limited to 8000 values by Lua's stack.
local function call(command, key, values)
  local sum = 0
  for first = 1, #values, 4000 do
    sum = sum + redis.call(command, key, unpack(values, first, math.min(first + 3999, #values)))
  end
  return sum
end

-- The flows that this batch changes, by their numbers.
local names, flows, leftovers = {}, {}, {}
for i = 1, tonumber(next_value()) do
  names[i] = next_value()
end
for i, size in ipairs(sizes_of(names, 1, 1)) do
  local set = prefix .. 'due:' .. names[i]
  local jobs = redis.call('ZCARD', set)
  if not size and jobs > 0 and not redis.call('ZSCORE', KEYS[2], names[i]) then
    -- Nothing refers to this set. It was left over when the shard lost both keys that list the flows, and was rebuilt.
    leftovers[#leftovers + 1] = set
  elseif jobs ~= (tonumber(size) or 0) then
    without_mark()
    return {'GAP', false, ARGV[2]}
  end
  flows[i] = {name = names[i], set = set, due = {}, not_due = {}}
end

local ended, forgotten, filled, buckets, lost = {}, {}, {}, {}, {'LOCATE'}
for i = 1, tonumber(next_value()) do
  local bucket = {name = next_value(), waiting = {}, ended = {}, forgotten = {}}
  local last = at + tonumber(ARGV[at]) * 4
  for j = at + 1, last, 4 do
    local due, id = flows[tonumber(ARGV[j])].due, ARGV[j + 2]
    local time, record = #due, #bucket.waiting
    due[time + 1], due[time + 2] = ARGV[j + 1], id
    bucket.waiting[record + 1], bucket.waiting[record + 2] = id, ARGV[j + 3]
  end
  at = last + 1
  last = at + tonumber(ARGV[at]) * 4
  for j = at + 1, last, 4 do
    local not_due, id = flows[tonumber(ARGV[j])].not_due, ARGV[j + 2]
    local time, record = #ended, #bucket.ended
    not_due[#not_due + 1] = id
    ended[time + 1], ended[time + 2] = ARGV[j + 1], id
    bucket.ended[record + 1], bucket.ended[record + 2] = id, ARGV[j + 3]
  end
  at = last + 1
  for _ = 1, tonumber(next_value()) do
    local number, id = tonumber(next_value()), next_value()
    bucket.forgotten[#bucket.forgotten + 1] = id
    forgotten[#forgotten + 1] = id
    if number > 0 then
      local not_due = flows[number].not_due
      not_due[#not_due + 1] = id
    elseif not redis.call('ZSCORE', KEYS[4], id)
      and redis.call('HEXISTS', prefix .. 'job:' .. bucket.name, id) == 1 then
      -- It was forgotten without having ended: its state record was deleted from outside.
      if number < 0 then
        without_mark()
        return {'GAP', false, ARGV[2]}
      end
      lost[#lost + 1] = id
    end
  end
  if #bucket.waiting + #bucket.ended > 0 then
    filled[#filled + 1] = bucket.name
  end
  buckets[i] = bucket
end

if #lost > 1 then
  return lost
end
-- A lost bucket must not be created again with some of its jobs: the others would then be unknown.
for _, bucket in ipairs(buckets) do
  if redis.call('EXISTS', prefix .. 'job:' .. bucket.name) == 0 and redis.call('SISMEMBER', KEYS[5], bucket.name) == 1 then
    without_mark()
    return {'GAP', false, ARGV[2]}
  end
end

local ends = {}
for i = 1, tonumber(next_value()) do
  ends[i] = next_value()
end

-- The oldest of the logs with jobs to forget must exist. Others that were lost are found when they are the oldest.
local oldest = redis.call('ZRANGE', KEYS[7], 0, 0)[1]
if oldest and redis.call('EXISTS', prefix .. 'evicted:' .. oldest) == 0 then
  without_mark()
  return {'GAP', false, ARGV[2]}
end

-- A full Redis refuses no write of a script that has already written. So the first command decides about the whole batch:
-- HSET is refused before anything has changed, and ZREM is never refused.
if ARGV[8] == '1' then
  redis.call('ZREM', KEYS[4], '')
else
  redis.call('HSET', KEYS[1], 'at', ARGV[4])
end
for _, set in ipairs(leftovers) do
  redis.call('UNLINK', set)
end
for _, flow in ipairs(flows) do
  call('ZREM', flow.set, flow.not_due)
  call('ZADD', flow.set, flow.due)
end
call('ZREM', KEYS[4], forgotten)
call('ZADD', KEYS[4], ended)
call('RPUSH', KEYS[6], ends)
call('SADD', KEYS[5], filled)
for _, bucket in ipairs(buckets) do
  local key = prefix .. 'job:' .. bucket.name
  if call('HSET', key, bucket.waiting) < #bucket.waiting / 2 then
    -- Some of these jobs existed before, and may have ended.
    local ids = {}
    for i = 1, #bucket.waiting, 2 do
      ids[#ids + 1] = bucket.waiting[i]
    end
    call('ZREM', KEYS[4], ids)
  end
  call('HSET', key, bucket.ended)
  if call('HDEL', key, bucket.forgotten) > 0 and redis.call('EXISTS', key) == 0 then
    redis.call('SREM', KEYS[5], bucket.name)
  end
end

-- Logs begin with the jobs that are forgotten first. One that is forgotten out of turn is skipped later.
local is_forgotten = {}
for _, id in ipairs(forgotten) do
  is_forgotten[id] = true
end
local left = #forgotten
while left > 0 do
  local log = redis.call('ZRANGE', KEYS[7], 0, 0)[1]
  if not log then
    break
  end
  local key = prefix .. 'evicted:' .. log
  local ids, count = redis.call('LRANGE', key, 0, left - 1), 0
  while ids[count + 1] and is_forgotten[ids[count + 1]] do
    count = count + 1
  end
  -- The next log may be lost. It stays in the set, so that the next script notices it.
  if count == 0 then
    break
  end
  redis.call('LTRIM', key, count, -1)
  if redis.call('EXISTS', key) == 1 then
    break
  end
  redis.call('ZREM', KEYS[7], log)
  left = left - count
end

local function without_end(entry)
  return string.sub(entry, 1, 16)
end

-- Jobs that are forgotten have usually ended first.
for _ = 1, #forgotten + 1000 do
  local first = redis.call('LINDEX', KEYS[6], 0)
  if not first or redis.call('ZSCORE', KEYS[4], without_end(first)) then
    break
  end
  redis.call('LPOP', KEYS[6])
end

-- Beyond the maximum, the jobs that ended first lose their records, up to one that has just ended: see is_evictable. Only their ids
-- stay, in logs of 2^18 ms by the time at which they are forgotten. If many jobs can lose their records at once, for example after the
-- maximum has been lowered, each batch evicts some of them.
local function is_evictable(entry)
  return math.abs(tonumber(ARGV[4]) - tonumber(string.sub(entry, 17))) >= tonumber(ARGV[7])
end
local excess = math.min(redis.call('LLEN', KEYS[6]) - tonumber(ARGV[9]), #ends + 1000)
if excess > 0 and is_evictable(redis.call('LINDEX', KEYS[6], 0)) then
  local logs, records, ids, evicted = {}, {}, {}, 0
  for _, entry in ipairs(redis.call('LRANGE', KEYS[6], 0, excess - 1)) do
    if not is_evictable(entry) then
      break
    end
    evicted = evicted + 1
    local id = without_end(entry)
    local forget = redis.call('ZSCORE', KEYS[4], id)
    if forget then
      local log, bucket = string.format('%.0f', math.floor(tonumber(forget) / 262144)), bucket_of(id)
      logs[log], records[bucket] = logs[log] or {}, records[bucket] or {}
      table.insert(logs[log], id)
      table.insert(records[bucket], id)
      ids[#ids + 1] = id
    end
  end
  redis.call('LTRIM', KEYS[6], evicted, -1)
  call('ZREM', KEYS[4], ids)
  for bucket, some in pairs(records) do
    local key = prefix .. 'job:' .. bucket
    call('HDEL', key, some)
    if redis.call('EXISTS', key) == 0 then
      redis.call('SREM', KEYS[5], bucket)
    end
  end
  for log, some in pairs(logs) do
    local key = prefix .. 'evicted:' .. log
    call('RPUSH', key, some)
    -- A week after the end of the slice, or after now if the shard is rebuilt later.
    local rest = math.max((tonumber(log) + 1) * 262144 - tonumber(ARGV[4]), 0)
    redis.call('PEXPIRE', key, string.format('%.0f', rest + 604800000))
    redis.call('ZADD', KEYS[7], log, log)
  end
end

local empty, firsts, sizes = {}, {}, {}
for _, flow in ipairs(flows) do
  local first = redis.call('ZRANGE', flow.set, 0, 0, 'WITHSCORES')
  if first[2] then
    firsts[#firsts + 1] = first[2]
    firsts[#firsts + 1] = flow.name
    sizes[#sizes + 1] = flow.name
    sizes[#sizes + 1] = redis.call('ZCARD', flow.set)
  else
    empty[#empty + 1] = flow.name
  end
end
call('ZREM', KEYS[2], empty)
call('HDEL', KEYS[3], empty)
call('ZADD', KEYS[2], firsts)
call('HSET', KEYS[3], sizes)

-- The expiry with which a stored value begins.
local function expiry_of(value)
  local expiry = 0
  for i = 1, 8 do
    expiry = expiry * 256 + string.byte(value, i)
  end
  return expiry
end

-- The log of time slices of this length that contains a key with this stored value.
local function log_of(value, bits)
  return bits .. string.format('.%.0f', math.floor(expiry_of(value) / 2 ^ tonumber(bits)))
end

-- The difference of the first bytes that differ between two positions. Operators compare strings by the locale.
local function compare(one, two, first, last)
  for i = first, last do
    local difference = (string.byte(one, i) or -1) - (string.byte(two, i) or -1)
    if difference ~= 0 then
      return difference
    end
  end
  return 0
end

-- Whether a stored value is in use by a job that was requested after the job of another value, see `is_earlier_use` in index.rs. The id of the job follows the expiry.
local function is_later_use(known, value)
  return compare(known, value, 17, 24) > 0 and compare(known, value, 9, 14) >= 0 and expiry_of(known) > tonumber(ARGV[4])
end

for _ = 1, tonumber(next_value()) do
  local log, life = next_value(), next_value()
  local bits = string.match(log, '^%d+')
  local last = at + tonumber(ARGV[at]) * 2
  local new = {}
  for first = at + 1, last, 4000 do
    local names = {}
    for i = first, math.min(first + 3999, last), 2 do
      names[#names + 1] = prefix .. 'idem:' .. ARGV[i]
    end
    for i, known in ipairs(redis.call('MGET', unpack(names))) do
      local hash = first + (i - 1) * 2
      if known ~= ARGV[hash + 1] and not (known and is_later_use(known, ARGV[hash + 1])) then
        redis.call('SET', names[i], ARGV[hash + 1], 'PX', life)
        -- A key that is used again often is in each log once.
        if not known or log_of(known, bits) ~= log then
          new[#new + 1] = ARGV[hash]
        end
      end
    end
  end
  at = last + 1
  if #new > 0 then
    local key = prefix .. 'idemlog:' .. log
    redis.call('APPEND', key, table.concat(new))
    redis.call('PEXPIRE', key, life)
    if redis.call('SADD', KEYS[8], log) == 1 then
      -- Logs are rarely created, so this is where logs that have expired are removed from the set.
      for _, other in ipairs(redis.call('SMEMBERS', KEYS[8])) do
        if redis.call('EXISTS', prefix .. 'idemlog:' .. other) == 0 then
          redis.call('SREM', KEYS[8], other)
        end
      end
    end
  end
end

redis.call('HSET', KEYS[1], 'offset', ARGV[3], 'at', ARGV[4], 'counts', counts(), 'seen', seconds())
if ARGV[1] ~= '' then
  redis.call('HSET', KEYS[1], 'seal', ARGV[1])
end
redis.call('HDEL', KEYS[1], 'cleared')
return {'OK'}
